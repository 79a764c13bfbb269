#include "services/router/output_formats/registry.h"

#include "services/base/status.h"
#include "services/router/output_formats/deepseek.h"
#include "services/router/output_formats/glm4.h"
#include "services/router/output_formats/harmony.h"
#include "services/router/output_formats/hermes.h"
#include "services/router/output_formats/json_calls.h"
#include "services/router/output_formats/llama3_json.h"
#include "services/router/output_formats/mistral.h"
#include "services/router/output_formats/pythonic.h"
#include "services/router/output_formats/qwen3_coder.h"
#include "services/router/output_formats/think_tags.h"

namespace spl::router {
namespace {

struct ToolFormat {
  const char* name;
  bool (*fits)(std::string_view chat_template);
  std::unique_ptr<OutputParser> (*make)(const CallableTools& tools);
  MakeCallGrammar grammar;
  bool special_tokens;  // its tags are special tokens of some models
};

constexpr char kHarmony[] = "harmony";  // calls and reasoning in one form

bool IsNeverChosen(std::string_view /*chat_template*/) { return false; }

std::unique_ptr<OutputParser> MakeHarmonyCalls(const CallableTools& tools) { return MakeHarmony(&tools, false); }

// The first one that fits is chosen.
constexpr ToolFormat kToolFormats[] = {
    {"deepseek", IsDeepSeek, MakeDeepSeek, DeepSeekGrammar, true},
    {"glm4", IsGlm4, MakeGlm4, Glm4Grammar, true},
    {kHarmony, IsHarmony, MakeHarmonyCalls, HarmonyGrammar, true},
    {"hermes", IsHermes, MakeHermes, HermesGrammar, true},
    {"json", IsNeverChosen, MakeJsonCalls, JsonCallsGrammar, false},
    {"pythonic", IsPythonic, MakePythonic, PythonicGrammar, true},
    {"llama3_json", IsLlama3Json, MakeLlama3Json, Llama3JsonGrammar, false},
    {"mistral", IsMistral, MakeMistral, MistralGrammar, true},
    {"qwen3_coder", IsQwen3Coder, MakeQwen3Coder, Qwen3CoderGrammar, true},
};

absl::StatusOr<std::string> ChooseTools(const std::string& asked, std::string_view chat_template) {
  std::string names;
  for (const ToolFormat& format : kToolFormats) {
    if (asked == format.name || (asked == "auto" && format.fits(chat_template))) return std::string(format.name);
    names += std::string(", ") + format.name;
  }
  if (asked == "auto" || asked == "none") return std::string("none");
  return InvalidArgument("--tool-parser is '{}', not one of auto, none{}", asked, names);
}

absl::StatusOr<std::string> ChooseReasoning(const std::string& asked, std::string_view chat_template) {
  if (asked == "none" || asked == "think" || asked == kHarmony) return asked;
  if (asked != "auto")
    return InvalidArgument("--reasoning-parser is '{}', not one of auto, none, think, harmony", asked);
  if (IsHarmony(chat_template)) return std::string(kHarmony);
  // Templates of DeepSeek-R1 have the end only.
  const bool thinks = chat_template.find(kThinkStart) != std::string_view::npos ||
                      chat_template.find(kThinkEnd) != std::string_view::npos;
  return std::string(thinks ? "think" : "none");
}

}  // namespace

absl::StatusOr<OutputFormat> ChooseOutputFormat(const OutputFormat& asked, std::string_view chat_template) {
  OutputFormat format;
  SPLICE_ASSIGN_OR_RETURN(format.tools, ChooseTools(asked.tools, chat_template));
  SPLICE_ASSIGN_OR_RETURN(format.reasoning, ChooseReasoning(asked.reasoning, chat_template));
  if (asked.tools == "auto" && format.reasoning == kHarmony) format.tools = kHarmony;
  if (asked.reasoning == "auto" && format.tools == kHarmony) format.reasoning = kHarmony;
  if ((format.tools == kHarmony) == (format.reasoning == kHarmony)) return format;
  if (format.tools == "none") return format;
  return InvalidArgument(
      "--tool-parser {} and --reasoning-parser {} do not go together: harmony writes calls and reasoning in one form, "
      "so choose it for both, or none for both",
      format.tools, format.reasoning);
}

bool EndsInReasoning(const OutputFormat& format, std::string_view prompt) {
  if (format.reasoning == kHarmony) return prompt.ends_with(kHarmonyReasoning);
  if (format.reasoning != "think") return false;
  const size_t last = prompt.find_last_not_of(kWhiteSpace);
  return last != std::string_view::npos && prompt.substr(0, last + 1).ends_with(kThinkStart);
}

bool NeedsSpecialTokens(const OutputFormat& format, bool may_call) {
  if (format.reasoning == kHarmony) return true;
  for (const ToolFormat& candidate : kToolFormats) {
    if (may_call && format.tools == candidate.name) return candidate.special_tokens;
  }
  return false;
}

absl::StatusOr<GrammarPart> CallGrammarOf(const std::string& format, const ForcedTools& tools) {
  for (const ToolFormat& candidate : kToolFormats) {
    if (format == candidate.name) return candidate.grammar(tools);
  }
  return absl::UnimplementedError(
      "calls can be forced only of a model that writes calls, and this one has no format of them: choose one with "
      "--tool-parser");
}

std::unique_ptr<OutputParser> MakeOutputParser(const OutputFormat& format, const CallableTools* tools,
                                               bool in_reasoning) {
  if (format.reasoning == kHarmony) return MakeHarmony(format.tools == kHarmony ? tools : nullptr, in_reasoning);
  std::unique_ptr<OutputParser> parser;
  for (const ToolFormat& candidate : kToolFormats) {
    if (tools != nullptr && format.tools == candidate.name) parser = candidate.make(*tools);
  }
  return format.reasoning == "think" ? MakeThinkTags(in_reasoning, std::move(parser)) : std::move(parser);
}

}  // namespace spl::router
