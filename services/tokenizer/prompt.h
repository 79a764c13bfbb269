// Encodes text as a prompt. In the template's text special tokens are parsed; in data, "<|im_end|>" is ten characters.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

// Encodes a template's text, or a raw prompt of a client in its place. Special tokens are parsed, except at `plain_at`
// (EncodeOptions). Adds the begin token like the model's tokenizer, but not in front of a text that spells it already:
// no model was trained on prompts with two begin tokens, which are the most common mistake with raw prompts.
inline absl::StatusOr<std::vector<TokenId>> EncodePrompt(const Tokenizer& tokenizer, std::string_view text,
                                                         bool add_special_tokens,
                                                         std::span<const size_t> plain_at = {}) {
  const auto bos = tokenizer.bos_id();
  const std::string_view piece = bos ? tokenizer.Piece(*bos) : std::string_view();
  const bool has_one = !piece.empty() && text.substr(0, piece.size()) == piece &&
                       !std::binary_search(plain_at.begin(), plain_at.end(), size_t{0});
  return tokenizer.Encode(
      text, {.add_special_tokens = add_special_tokens && !has_one, .parse_special_tokens = true, .plain_at = plain_at});
}

// Encodes data, for example a document: no special tokens are parsed.
inline absl::StatusOr<std::vector<TokenId>> EncodeData(const Tokenizer& tokenizer, std::string_view text) {
  return tokenizer.Encode(text, {.parse_special_tokens = false});
}

// Puts `mark` in front of every special token that `text` spells. For data that passes through a chat template.
inline std::string MarkSpecialTokens(const Tokenizer& tokenizer, std::string_view text, std::string_view mark) {
  std::string marked;
  size_t done = 0;
  for (const size_t at : tokenizer.SpecialTokensIn(text)) {
    marked.append(text.substr(done, at - done)).append(mark);
    done = at;
  }
  return marked.append(text.substr(done));
}

// A rendered text without its marks, and the offsets of the marks, which are EncodePrompt's plain_at.
struct UnmarkedText {
  std::string text;
  std::vector<size_t> plain_at;
};
inline UnmarkedText RemoveMarks(std::string_view marked, std::string_view mark) {
  UnmarkedText unmarked;
  for (size_t done = 0;;) {
    const size_t at = marked.find(mark, done);
    unmarked.text.append(marked.substr(done, at - done));
    if (at == std::string_view::npos) return unmarked;
    unmarked.plain_at.push_back(unmarked.text.size());
    done = at + mark.size();
  }
}

}  // namespace spl::tokenizer
