#include "tools/cli/load_plan.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "services/base/status.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr uint32_t kTokensPerHashId = 512;  // as in the published traces

void AppendTokens(const LoadPlanOptions& options, uint64_t seed, uint32_t count, std::vector<int32_t>* out) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<size_t> pick(0, options.alphabet.size() - 1);
  for (uint32_t i = 0; i < count; ++i) out->push_back(options.alphabet[pick(random)]);
}

// Sets ignore_eos, because a load test needs answers of the given length.
json CommonBody(const LoadPlanOptions& options, uint32_t output_tokens) {
  json body = {{"max_tokens", output_tokens},
               {"temperature", options.temperature},
               {"seed", options.seed},
               {"ignore_eos", true},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}}};
  if (!options.model.empty()) body["model"] = options.model;
  return body;
}

class PoissonArrivals {
 public:
  PoissonArrivals(double rate_per_s, uint64_t seed) : random_(seed ^ 0x9E3779B97F4A7C15ull), gap_(rate_per_s) {}
  std::chrono::nanoseconds Next() {
    at_ += gap_(random_);
    return std::chrono::nanoseconds(static_cast<int64_t>(at_ * 1e9));
  }

 private:
  std::mt19937_64 random_;
  std::exponential_distribution<double> gap_;
  double at_ = 0;
};

uint32_t LengthOf(const json& line, const char* name, const char* other_name, uint32_t fallback) {
  for (const char* key : {name, other_name}) {
    const auto it = line.find(key);
    if (it != line.end() && it->is_number_unsigned()) return static_cast<uint32_t>(it->get<uint64_t>());
  }
  return fallback;
}

std::vector<int32_t> TracePrompt(const json& line, const LoadPlanOptions& options, uint64_t line_number) {
  const uint32_t length = std::max(1u, LengthOf(line, "input_length", "input_tokens", options.input_tokens));
  std::vector<int32_t> tokens;
  const auto ids = line.find("hash_ids");
  if (ids != line.end() && ids->is_array()) {
    for (const json& id : *ids) {
      if (!id.is_number_integer() || tokens.size() >= length) break;
      AppendTokens(options, options.seed * 1000003 + id.get<uint64_t>(), kTokensPerHashId, &tokens);
    }
    tokens.resize(std::min<size_t>(tokens.size(), length));
  }
  AppendTokens(options, options.seed + line_number * 7919, length - static_cast<uint32_t>(tokens.size()), &tokens);
  return tokens;
}

}  // namespace

std::vector<PlannedRequest> MakeSyntheticPlan(const LoadPlanOptions& options) {
  std::vector<int32_t> prefix;
  AppendTokens(options, options.seed, std::min(options.shared_prefix_tokens, options.input_tokens), &prefix);
  std::optional<PoissonArrivals> arrivals;
  if (options.rate_per_s > 0) arrivals.emplace(options.rate_per_s, options.seed);
  std::vector<PlannedRequest> plan;
  for (uint32_t i = 0; i < options.num_requests; ++i) {
    std::vector<int32_t> tokens = prefix;
    // The next seed has other prompts: none may be in a prefix cache.
    AppendTokens(options, options.seed * 1000003 + 1 + i, options.input_tokens - static_cast<uint32_t>(prefix.size()),
                 &tokens);
    json body = CommonBody(options, options.output_tokens);
    body["prompt"] = tokens;
    PlannedRequest request{.body = body.dump()};
    if (arrivals.has_value()) request.at = arrivals->Next();
    plan.push_back(std::move(request));
  }
  return plan;
}

absl::StatusOr<std::vector<PlannedRequest>> ReadTracePlan(const std::string& path, const LoadPlanOptions& options,
                                                          bool keep_timestamps) {
  std::ifstream file(path);
  if (!file) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  std::optional<PoissonArrivals> arrivals;
  if (options.rate_per_s > 0) arrivals.emplace(options.rate_per_s, options.seed);
  std::vector<PlannedRequest> plan;
  std::string text;
  for (uint64_t number = 1; std::getline(file, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (options.num_requests > 0 && plan.size() >= options.num_requests) break;
    const json line = json::parse(text, nullptr, false);
    if (!line.is_object()) return InvalidArgument("{}:{}: not a JSON object", path, number);
    json body = CommonBody(options, LengthOf(line, "output_length", "output_tokens", options.output_tokens));
    PlannedRequest request;
    if (line.contains("messages")) {
      request.path = "/v1/chat/completions";
      body["messages"] = line["messages"];
    } else if (line.contains("prompt")) {
      body["prompt"] = line["prompt"];
    } else {
      body["prompt"] = TracePrompt(line, options, number);
    }
    request.body = body.dump(-1, ' ', false, json::error_handler_t::replace);
    const auto timestamp = line.find("timestamp");
    if (arrivals.has_value()) {
      request.at = arrivals->Next();
    } else if (keep_timestamps && timestamp != line.end() && timestamp->is_number()) {
      request.at = std::chrono::nanoseconds(static_cast<int64_t>(timestamp->get<double>() * 1e6));
    }
    plan.push_back(std::move(request));
  }
  if (plan.empty()) return InvalidArgument("{}: holds no request", path);
  return plan;
}

}  // namespace spl::cli
