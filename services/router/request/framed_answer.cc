#include "services/router/request/framed_answer.h"

#include <utility>

#include "services/grammar/tag_part.h"
#include "services/router/output_formats/framed_answers.h"
#include "services/router/request/api_error.h"

namespace spl::router {

absl::Status FrameAnswer(const OutputFormat& format, const SpecialTokenId& special, ApiRequest& request) {
  using grammar::GrammarKind;
  Sampling& sampling = request.generation.sampling;
  const auto* const chat = std::get_if<ChatPrompt>(&request.generation.prompt);
  if (!sampling.structured_output.has_value() || request.forced_calls.has_value() || !FramesAnswers(format))
    return absl::OkStatus();
  if (chat == nullptr || chat->continue_final_message || !chat->add_generation_prompt) return absl::OkStatus();
  const GrammarKind kind = sampling.structured_output->kind;
  if (kind == GrammarKind::kStructuralTag) return absl::OkStatus();
  absl::StatusOr<GrammarPart> content = grammar::TagPartOf(*sampling.structured_output);
  if (!content.ok()) return ParamError(sampling.structured_field, "{}", MessageOf(content.status()));
  const bool is_json = kind == GrammarKind::kJsonObject || kind == GrammarKind::kJsonSchema;
  const GrammarPart tag = {{"type", "structural_tag"},
                           {"format", FramedAnswer(format, *std::move(content), is_json, special)}};
  sampling.structured_output = grammar::GrammarSpec{GrammarKind::kStructuralTag,
                                                    tag.dump(-1, ' ', false, Json::error_handler_t::replace), false};
  request.framed = true;
  return absl::OkStatus();
}

}  // namespace spl::router
