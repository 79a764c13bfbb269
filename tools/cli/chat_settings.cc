#include "tools/cli/chat_settings.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "services/base/field_error.h"
#include "services/base/status.h"
#include "services/router/request/reuse_json.h"
#include "spl/v1/reuse.pb.h"

namespace spl::cli {

using Json = nlohmann::ordered_json;

// A parameter of sampling: a real or a whole number.
struct ChatSettings::Number {
  const char* name;
  double low, high;
  std::optional<double> TextRequest::*real;
  std::optional<int64_t> TextRequest::*whole;  // where `real` is null
};

namespace {

constexpr double kMaxWhole = 9e15;  // below 2^53, so that a double holds it
constexpr char kDefault[] = "default";

}  // namespace

std::span<const ChatSettings::Number> ChatSettings::Numbers() {
  static constexpr Number kNumbers[] = {
      {"temperature", 0, 2, &TextRequest::temperature, nullptr},
      {"top_p", 0, 1, &TextRequest::top_p, nullptr},
      {"min_p", 0, 1, &TextRequest::min_p, nullptr},
      {"repetition_penalty", 0.01, 10, &TextRequest::repetition_penalty, nullptr},
      {"top_k", 0, 1e6, nullptr, &TextRequest::top_k},
      {"seed", 0, kMaxWhole, nullptr, &TextRequest::seed},
      {"max_tokens", 1, 1e9, nullptr, &TextRequest::max_tokens},
  };
  return kNumbers;
}

const ChatSettings::Number* ChatSettings::Find(std::string_view name) {
  for (const Number& number : Numbers()) {
    if (name == number.name) return &number;
  }
  return nullptr;
}

absl::Status ChatSettings::Set(std::string_view name, std::string_view value) {
  const Number* const number = Find(name);
  if (number == nullptr) return SetOption(std::string(name), value);
  if (value == kDefault) {
    if (number->real != nullptr)
      values_.*(number->real) = std::nullopt;
    else
      values_.*(number->whole) = std::nullopt;
    return absl::OkStatus();
  }
  double parsed = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  const bool whole = number->real == nullptr;
  if (error != std::errc() || end != value.data() + value.size() ||
      !(parsed >= number->low && parsed <= number->high) || (whole && parsed != std::floor(parsed)))
    return InvalidArgument("{} must be a {} from {} to {}, or \"default\"", name, whole ? "whole number" : "number",
                           number->low, number->high);
  if (whole)
    values_.*(number->whole) = static_cast<int64_t>(parsed);
  else
    values_.*(number->real) = parsed;
  return absl::OkStatus();
}

absl::Status ChatSettings::SetOption(const std::string& name, std::string_view value) {
  Json options = options_;
  if (value == kDefault) {
    options.erase(name);
  } else {
    options[name] = Json::parse(value, nullptr, /*allow_exceptions=*/false);
    if (options[name].is_discarded()) options[name] = std::string(value);
  }
  std::string reuse, decode, name_space;
  v1::ReuseOptions parsed;
  router::ObjectReader reader(options, "");
  reader.String("reuse", &reuse);
  reader.String("decode", &decode);
  reader.String("namespace", &name_space);
  router::ReadReuseOptions(reader, parsed);
  if (const absl::Status status = reader.Finish(); !status.ok()) {
    const bool unknown = status.GetPayload(kErrorCodePayload) == absl::Cord("unknown_field");
    if (!unknown || !MessageOf(status).starts_with(name + ":")) return status;  // or a member of a group is
    return InvalidArgument(
        "{}: there is no such setting. Settings are temperature, top_p, top_k, min_p, repetition_penalty, seed, "
        "max_tokens, reuse, decode, namespace, and the options of reuse (docs/options.md)",
        name);
  }
  if (in_process_ && value != kDefault)
    return InvalidArgument("{}: a model in this process reuses nothing; start splice serve and give --endpoint", name);
  options_ = std::move(options);
  return absl::OkStatus();
}

std::string ChatSettings::ToString() const {
  std::string text;
  const auto add = [&](std::string_view name, const std::string& value) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, value);
  };
  for (const Number& n : Numbers()) {
    if (n.real != nullptr && values_.*(n.real)) add(n.name, fmt::format("{}", *(values_.*(n.real))));
    if (n.real == nullptr && values_.*(n.whole)) add(n.name, fmt::format("{}", *(values_.*(n.whole))));
  }
  for (const auto& [name, value] : options_.items())
    add(name, value.is_string() ? value.get<std::string>() : value.dump());
  return text;
}

void ChatSettings::Apply(TextRequest& request) const {
  for (const Number& n : Numbers()) {
    if (n.real != nullptr)
      request.*(n.real) = values_.*(n.real);
    else
      request.*(n.whole) = values_.*(n.whole);
  }
  if (request.reuse_options.is_null()) request.reuse_options = nlohmann::json::object();
  for (const auto& [name, value] : options_.items()) {
    if (name == "reuse")
      request.reuse = value.get<std::string>();
    else if (name == "decode")
      request.decode = value.get<std::string>();
    else
      request.reuse_options[name] = nlohmann::json(value);
  }
}

}  // namespace spl::cli
