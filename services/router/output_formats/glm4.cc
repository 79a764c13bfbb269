#include "services/router/output_formats/glm4.h"

#include <algorithm>

#include "services/router/output_formats/tagged_calls.h"
#include "services/router/output_formats/typed_arguments.h"

namespace spl::router {
namespace {

constexpr std::string_view kKey = "<arg_key>", kKeyEnd = "</arg_key>";
constexpr std::string_view kValue = "<arg_value>", kValueEnd = "</arg_value>";

std::string_view Trim(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kWhiteSpace), text.size()));
  return text.substr(0, text.find_last_not_of(kWhiteSpace) + 1);  // npos: 0
}

std::optional<ToolCallDelta> Read(const TypedArguments& types, std::string_view text) {
  const size_t name_end = std::min(text.find('<'), text.size());
  const std::string_view name = Trim(text.substr(0, name_end));
  if (name.empty() || name.find_first_of(" \t\n\r{}\"") != std::string_view::npos) return std::nullopt;
  text.remove_prefix(name_end);
  ArgumentList arguments(types, name);
  while (SkipTag(&text, kKey)) {
    std::string_view key, value;
    if (!TakeUntil(&text, kKeyEnd, &key) || Trim(key).empty() || !SkipTag(&text, kValue) ||
        !TakeUntil(&text, kValueEnd, &value)) {
      return std::nullopt;
    }
    arguments.Set(Trim(key), value);
  }
  if (!Trim(text).empty()) return std::nullopt;
  return arguments.ToCall();
}

}  // namespace

std::unique_ptr<OutputParser> MakeGlm4(const CallableTools& tools) {
  return MakeTaggedCalls([types = TypedArguments(tools.json)](std::string_view text) { return Read(types, text); },
                         tools.make_id);
}

bool IsGlm4(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has(kKey) && has(kValue);
}

}  // namespace spl::router
