#include "services/router/output_formats/qwen3_coder.h"

#include "services/router/output_formats/tagged_calls.h"
#include "services/router/output_formats/typed_arguments.h"

namespace spl::router {
namespace {

constexpr std::string_view kFunction = "<function=", kFunctionEnd = "</function>";
constexpr std::string_view kParameter = "<parameter=", kParameterEnd = "</parameter>";

std::optional<ToolCallDelta> Read(const TypedArguments& types, std::string_view text) {
  std::string_view name;
  if (!SkipTag(&text, kFunction) || !TakeUntil(&text, ">", &name) || name.empty()) return std::nullopt;
  ArgumentList arguments(types, name);
  while (SkipTag(&text, kParameter)) {
    std::string_view key, value;
    if (!TakeUntil(&text, ">", &key) || key.empty() || !TakeUntil(&text, kParameterEnd, &value)) return std::nullopt;
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    arguments.Set(key, value);
  }
  if (!SkipTag(&text, kFunctionEnd) || text.find_first_not_of(kWhiteSpace) != std::string_view::npos)
    return std::nullopt;
  return arguments.ToCall();
}

}  // namespace

std::unique_ptr<OutputParser> MakeQwen3Coder(const CallableTools& tools) {
  return MakeTaggedCalls([types = TypedArguments(tools.json)](std::string_view text) { return Read(types, text); },
                         tools.make_id);
}

bool IsQwen3Coder(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has(kFunction) && has(kParameter);
}

}  // namespace spl::router
