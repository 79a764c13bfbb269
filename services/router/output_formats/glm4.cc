#include "services/router/output_formats/glm4.h"

#include <algorithm>

#include "services/base/status.h"
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
        !arguments.Take(Trim(key), &text, kValueEnd, &value)) {
      return std::nullopt;
    }
    arguments.Set(Trim(key), value);
  }
  if (!Trim(text).empty()) return std::nullopt;
  return arguments.ToCall();
}

bool IsKey(std::string_view name) {
  return !name.empty() && Trim(name) == name && name.find('<') == std::string_view::npos;
}

}  // namespace

std::unique_ptr<OutputParser> MakeGlm4(const CallableTools& tools) {
  return MakeTaggedCalls([types = TypedArguments(tools)](std::string_view text) { return Read(types, text); },
                         tools.make_id, tools.forced);
}

absl::StatusOr<GrammarPart> Glm4Grammar(const ForcedTools& tools) {
  std::vector<GrammarPart> calls;
  for (const ForcedTool& tool : tools.tools) {
    SPLICE_ASSIGN_OR_RETURN(const std::vector<ForcedArgument> arguments, ForcedArguments(tool, IsKey));
    std::vector<GrammarPart> call = {TagPart(tools, kCallStart), LiteralPart(tool.name + "\n")};
    for (const ForcedArgument& argument : arguments) {
      GrammarPart part =
          SequencePart({TagPart(tools, kKey), LiteralPart(argument.name), TagPart(tools, kKeyEnd), LiteralPart("\n"),
                        TagPart(tools, kValue), TypedValuePart(argument.schema, kValueEnd), TagPart(tools, kValueEnd),
                        LiteralPart("\n")});
      call.push_back(argument.required ? std::move(part) : OptionalPart(std::move(part)));
    }
    call.push_back(TagPart(tools, kCallEnd));
    if (!tools.one) call.push_back(OptionalPart(LiteralPart("\n")));
    calls.push_back(SequencePart(std::move(call)));
  }
  return RepeatedPart(AnyOfPart(std::move(calls)), tools.one);
}

bool IsGlm4(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has(kKey) && has(kValue);
}

}  // namespace spl::router
