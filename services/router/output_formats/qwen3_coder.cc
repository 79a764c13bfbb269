#include "services/router/output_formats/qwen3_coder.h"

#include "services/base/status.h"
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
    if (!TakeUntil(&text, ">", &key) || key.empty() || !arguments.Take(key, &text, kParameterEnd, &value))
      return std::nullopt;
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    arguments.Set(key, value);
  }
  if (!SkipTag(&text, kFunctionEnd) || text.find_first_not_of(kWhiteSpace) != std::string_view::npos)
    return std::nullopt;
  return arguments.ToCall();
}

bool IsKey(std::string_view name) { return !name.empty() && name.find_first_of("<>\n") == std::string_view::npos; }

}  // namespace

std::unique_ptr<OutputParser> MakeQwen3Coder(const CallableTools& tools) {
  return MakeTaggedCalls([types = TypedArguments(tools)](std::string_view text) { return Read(types, text); },
                         tools.make_id, tools.forced);
}

absl::StatusOr<GrammarPart> Qwen3CoderGrammar(const ForcedTools& tools) {
  std::vector<GrammarPart> calls;
  for (const ForcedTool& tool : tools.tools) {
    SPLICE_ASSIGN_OR_RETURN(const std::vector<ForcedArgument> arguments, ForcedArguments(tool, IsKey));
    std::vector<GrammarPart> call = {TagPart(tools, kCallStart),
                                     LiteralPart("\n" + std::string(kFunction) + tool.name + ">\n")};
    for (const ForcedArgument& argument : arguments) {
      GrammarPart part = SequencePart({LiteralPart(std::string(kParameter) + argument.name + ">\n"),
                                       TypedValuePart(argument.schema, kParameterEnd),
                                       LiteralPart("\n" + std::string(kParameterEnd) + "\n")});
      call.push_back(argument.required ? std::move(part) : OptionalPart(std::move(part)));
    }
    call.push_back(LiteralPart(std::string(kFunctionEnd) + "\n"));
    call.push_back(TagPart(tools, kCallEnd));
    if (!tools.one) call.push_back(OptionalPart(LiteralPart("\n")));
    calls.push_back(SequencePart(std::move(call)));
  }
  return RepeatedPart(AnyOfPart(std::move(calls)), tools.one);
}

bool IsQwen3Coder(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has(kFunction) && has(kParameter);
}

}  // namespace spl::router
