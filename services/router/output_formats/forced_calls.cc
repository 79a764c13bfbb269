#include "services/router/output_formats/forced_calls.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "services/base/status.h"
#include "services/router/output_formats/registry.h"

namespace spl::router {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxNameBytes = 64;  // parsers look for the end of a name so far, at least

bool IsIdentifier(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  });
}

}  // namespace

absl::StatusOr<std::string> ForcedCallsTag(const std::string& format, const std::string& tools_json,
                                           const ForcedCalls& calls, const SpecialTokenId& special) {
  const Json tools = Json::parse(tools_json, nullptr, false);
  ForcedTools forced{.tools = {}, .one = calls.one, .special = special};
  for (const Json& tool : tools.is_array() ? tools : Json::array()) {
    const Json function = tool.is_object() ? tool.value("function", Json::object()) : Json::object();
    const Json name_of = function.is_object() ? function.value("name", Json()) : Json();
    if (!name_of.is_string()) return absl::InvalidArgumentError("a tool has no function.name");
    const auto name = name_of.get<std::string>();
    if (!calls.name.empty() && name != calls.name) continue;
    if (!IsIdentifier(name))
      return InvalidArgument(
          "the tool \"{}\" cannot be forced: its name must be of letters, digits, _, - and ., {} at most", name,
          kMaxNameBytes);
    Json parameters = function.value("parameters", Json());
    if (parameters.is_null()) parameters = {{"type", "object"}, {"properties", Json::object()}};
    forced.tools.push_back({name, std::move(parameters)});
  }
  if (forced.tools.empty()) {
    if (calls.name.empty()) return absl::InvalidArgumentError("forces a call, and there are no tools");
    return InvalidArgument("there is no tool \"{}\"", calls.name);
  }
  SPLICE_ASSIGN_OR_RETURN(GrammarPart part, CallGrammarOf(format, forced));
  const Json tag = {{"type", "structural_tag"}, {"format", std::move(part)}};
  return tag.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace spl::router
