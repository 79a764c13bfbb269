#include "services/router/output_formats/qwen3_coder.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "services/router/output_formats/tagged_calls.h"

namespace spl::router {
namespace {

using Json = nlohmann::json;
// Parameters of type string, by function.
using StringParameters = std::map<std::string, std::set<std::string>, std::less<>>;

constexpr std::string_view kFunction = "<function=", kFunctionEnd = "</function>";
constexpr std::string_view kParameter = "<parameter=", kParameterEnd = "</parameter>";

Json Parse(std::string_view text) { return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false); }

bool IsStringType(const Json& schema) {
  if (!schema.is_object()) return false;
  const auto type = schema.find("type");
  if (type == schema.end()) return false;
  return *type == "string" ||
         (type->is_array() && std::find(type->begin(), type->end(), Json("string")) != type->end());
}

// Whatever is no schema of an object has no such parameters.
StringParameters ReadStringParameters(const std::string& tools_json) {
  StringParameters out;
  const Json tools = Parse(tools_json);
  for (const Json& tool : tools.is_array() ? tools : Json::array()) {
    const Json function = tool.is_object() ? tool.value("function", Json()) : Json();
    if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) continue;
    const Json parameters = function.value("parameters", Json());
    const Json properties = parameters.is_object() ? parameters.value("properties", Json()) : Json();
    for (const auto& item : properties.items()) {
      if (properties.is_object() && IsStringType(item.value())) out[function["name"]].insert(item.key());
    }
  }
  return out;
}

std::string ValueJson(std::string_view value, bool is_string) {
  if (!is_string) {
    if (value == "True") return "true";
    if (value == "False") return "false";
    if (value == "None") return "null";
    if (Json::accept(value.begin(), value.end())) return std::string(value);
  }
  return Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Takes `prefix` from the beginning of `text`, behind white space.
bool Skip(std::string_view* text, std::string_view prefix) {
  text->remove_prefix(std::min(text->find_first_not_of(kWhiteSpace), text->size()));
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// Takes the text in front of `end`, and the end.
bool Until(std::string_view* text, std::string_view end, std::string_view* out) {
  const size_t at = text->find(end);
  if (at == std::string_view::npos) return false;
  *out = text->substr(0, at);
  text->remove_prefix(at + end.size());
  return true;
}

std::optional<ToolCallDelta> Read(const StringParameters& strings, std::string_view text) {
  std::string_view name;
  if (!Skip(&text, kFunction) || !Until(&text, ">", &name) || name.empty()) return std::nullopt;
  const auto of_function = strings.find(name);
  std::vector<std::pair<std::string_view, std::string>> arguments;
  while (Skip(&text, kParameter)) {
    std::string_view key, value;
    if (!Until(&text, ">", &key) || key.empty() || !Until(&text, kParameterEnd, &value)) return std::nullopt;
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    const bool is_string = of_function != strings.end() && of_function->second.contains(std::string(key));
    std::erase_if(arguments, [key = key](const auto& other) { return other.first == key; });  // the last one counts
    arguments.emplace_back(key, ValueJson(value, is_string));
  }
  if (!Skip(&text, kFunctionEnd) || text.find_first_not_of(kWhiteSpace) != std::string_view::npos) return std::nullopt;
  ToolCallDelta call;
  call.name = name;
  for (const auto& [key, value] : arguments)
    call.arguments += (call.arguments.empty() ? "{" : ", ") + ValueJson(key, true) + ": " + value;
  call.arguments += call.arguments.empty() ? "{}" : "}";
  return call;
}

}  // namespace

std::unique_ptr<OutputParser> MakeQwen3Coder(const CallableTools& tools) {
  return MakeTaggedCalls(
      [strings = ReadStringParameters(tools.json)](std::string_view text) { return Read(strings, text); },
      tools.make_id);
}

bool IsQwen3Coder(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has(kFunction) && has(kParameter);
}

}  // namespace spl::router
