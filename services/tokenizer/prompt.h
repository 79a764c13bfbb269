// Text as a prompt.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

// Encodes with special tokens parsed. The begin token is added as the model's tokenizer does, but not a second one in
// front of a text that already spells it: two begin tokens are a prompt that no model was trained on, and the most
// common mistake with raw prompts.
inline absl::StatusOr<std::vector<TokenId>> EncodePrompt(const Tokenizer& tokenizer, std::string_view text,
                                                         bool add_special_tokens) {
  const auto bos = tokenizer.bos_id();
  const std::string_view piece = bos ? tokenizer.Piece(*bos) : std::string_view();
  const bool has_one = !piece.empty() && text.substr(0, piece.size()) == piece;
  return tokenizer.Encode(text, {.add_special_tokens = add_special_tokens && !has_one, .parse_special_tokens = true});
}

}  // namespace spl::tokenizer
