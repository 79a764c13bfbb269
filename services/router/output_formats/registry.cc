#include "services/router/output_formats/registry.h"

#include "services/base/status.h"
#include "services/router/output_formats/glm4.h"
#include "services/router/output_formats/hermes.h"
#include "services/router/output_formats/llama3_json.h"
#include "services/router/output_formats/mistral.h"
#include "services/router/output_formats/qwen3_coder.h"
#include "services/router/output_formats/think_tags.h"

namespace spl::router {
namespace {

struct ToolFormat {
  const char* name;
  bool (*fits)(std::string_view chat_template);
  std::unique_ptr<OutputParser> (*make)(const CallableTools& tools);
  bool special_tokens;  // its tags are special tokens of some models
};

constexpr ToolFormat kToolFormats[] = {
    {"glm4", IsGlm4, MakeGlm4, true},
    {"hermes", IsHermes, MakeHermes, true},
    {"llama3_json", IsLlama3Json, MakeLlama3Json, false},
    {"mistral", IsMistral, MakeMistral, true},
    {"qwen3_coder", IsQwen3Coder, MakeQwen3Coder, true},
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

}  // namespace

absl::StatusOr<OutputFormat> ChooseOutputFormat(const OutputFormat& asked, std::string_view chat_template) {
  OutputFormat format;
  SPLICE_ASSIGN_OR_RETURN(format.tools, ChooseTools(asked.tools, chat_template));
  const bool thinks = chat_template.find(kThinkStart) != std::string_view::npos;
  if (asked.reasoning == "think" || (asked.reasoning == "auto" && thinks)) {
    format.reasoning = "think";
  } else if (asked.reasoning != "auto" && asked.reasoning != "none") {
    return InvalidArgument("--reasoning-parser is '{}', not one of auto, none, think", asked.reasoning);
  }
  return format;
}

bool EndsInReasoning(const OutputFormat& format, std::string_view prompt) {
  if (format.reasoning != "think") return false;
  const size_t last = prompt.find_last_not_of(kWhiteSpace);
  return last != std::string_view::npos && prompt.substr(0, last + 1).ends_with(kThinkStart);
}

bool NeedsSpecialTokens(const OutputFormat& format) {
  for (const ToolFormat& candidate : kToolFormats) {
    if (format.tools == candidate.name) return candidate.special_tokens;
  }
  return false;
}

std::unique_ptr<OutputParser> MakeOutputParser(const OutputFormat& format, const CallableTools* tools,
                                               bool in_reasoning) {
  std::unique_ptr<OutputParser> parser;
  for (const ToolFormat& candidate : kToolFormats) {
    if (tools != nullptr && format.tools == candidate.name) parser = candidate.make(*tools);
  }
  return format.reasoning == "think" ? MakeThinkTags(in_reasoning, std::move(parser)) : std::move(parser);
}

}  // namespace spl::router
