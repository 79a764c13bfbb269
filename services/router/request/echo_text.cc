#include "services/router/request/echo_text.h"

namespace spl::router {

std::string EchoText(const ServedModel& model, const GenerationRequest& request, const Prompt& prompt) {
  if (const auto* text = std::get_if<std::string>(&prompt)) return *text;
  const absl::StatusOr<TokenizedPrompt> tokens = model.Tokenize(prompt, request.add_special_tokens);
  if (!tokens.ok()) return "";
  return model.tokenizer().Decode(tokens->ids, {.skip_special_tokens = request.skip_special_tokens}).value_or("");
}

}  // namespace spl::router
