#include "services/router/output_formats/forced_calls.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "services/base/status.h"

namespace spl::router {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxArgumentSpace = 2;  // white space between two parts of the arguments

// How a format writes one call around the JSON of its arguments, and what stands between two calls.
struct CallShape {
  const char* format;
  const char *begin, *middle, *end, *separator;
};

constexpr CallShape kShapes[] = {
    {"hermes", "<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>", "\n"},
    {"json", "{\"name\": \"", "\", \"arguments\": ", "}", "\n"},
    {"llama3_json", "{\"name\": \"", "\", \"parameters\": ", "}", "; "},
};

bool IsIdentifier(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  });
}

Json TagOf(const CallShape& shape, const std::string& name, Json parameters) {
  return {
      {"type", "tag"},
      {"begin", shape.begin + name + shape.middle},
      {"content",
       {{"type", "json_schema"}, {"json_schema", std::move(parameters)}, {"max_whitespace_cnt", kMaxArgumentSpace}}},
      {"end", shape.end}};
}

}  // namespace

absl::StatusOr<std::string> ForcedCallsTag(const std::string& format, const std::string& tools_json,
                                           const ForcedCalls& calls) {
  const auto* const shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                                         [&](const CallShape& candidate) { return format == candidate.format; });
  if (shape == std::end(kShapes))
    return Errorf(absl::StatusCode::kUnimplemented,
                  "calls can be forced of models that write them as hermes, json or llama3_json, and this one's format "
                  "is {} (--tool-parser)",
                  format);
  const Json tools = Json::parse(tools_json, nullptr, false);
  Json tags = Json::array();
  for (const Json& tool : tools.is_array() ? tools : Json::array()) {
    const Json function = tool.is_object() ? tool.value("function", Json::object()) : Json::object();
    const Json name_of = function.is_object() ? function.value("name", Json()) : Json();
    if (!name_of.is_string()) return absl::InvalidArgumentError("a tool has no function.name");
    const auto name = name_of.get<std::string>();
    if (!calls.name.empty() && name != calls.name) continue;
    if (!IsIdentifier(name))
      return InvalidArgument("the tool \"{}\" cannot be forced: its name must be of letters, digits, _, - and .", name);
    Json parameters = function.value("parameters", Json());
    if (parameters.is_null()) parameters = {{"type", "object"}, {"properties", Json::object()}};
    tags.push_back(TagOf(*shape, name, std::move(parameters)));
  }
  if (tags.empty()) {
    if (calls.name.empty()) return absl::InvalidArgumentError("forces a call, and there are no tools");
    return InvalidArgument("there is no tool \"{}\"", calls.name);
  }
  const Json tag = {{"type", "structural_tag"},
                    {"format",
                     {{"type", "tags_with_separator"},
                      {"tags", std::move(tags)},
                      {"separator", shape->separator},
                      {"at_least_one", true},
                      {"stop_after_first", calls.one}}}};
  return tag.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace spl::router
