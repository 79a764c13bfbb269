// The "added_tokens" of tokenizer.json: tokens that are found in the text before anything else happens to it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/json_fields.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // matched after normalization, not before
  bool lstrip = false;       // takes the whitespace before it along
  bool rstrip = false;       // and after it
  bool single_word = false;  // not inside a word
};

// `field` is one entry; its id comes from the member "id", or from `id` where the file keys entries by it.
absl::StatusOr<AddedToken> ParseAddedToken(const JsonField& field, std::optional<int64_t> id);

// A part of a text: bytes [begin, end), which are the token `id`, or plain text (-1).
struct TokenSegment {
  size_t begin = 0;
  size_t end = 0;
  TokenId id = -1;
};

// Finds added tokens: leftmost first, and of those the longest. Immutable after the last Add; then may be used from any
// thread at once.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() : nodes_(1) {}

  // `spelling` is what is searched for: the content, or its normalized form.
  void Add(const AddedToken& token, std::string_view spelling);
  bool empty() const { return tokens_.empty(); }

  // Cuts `text` (valid UTF-8) into segments, in order. Special tokens are plain text unless `parse_special`, and where
  // they begin at one of `plain_at`, which ascends.
  // Cost: O(text bytes × longest token) at worst, one table look-up per byte that starts no token.
  std::vector<TokenSegment> Split(std::string_view text, bool parse_special,
                                  std::span<const size_t> plain_at = {}) const;
  // Where special tokens begin, overlapping ones included; ascending.
  std::vector<size_t> SpecialTokensIn(std::string_view text) const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, int32_t>> children;
    int32_t token_idx = -1;
  };
  struct Match {
    int32_t token_idx = -1;
    size_t num_bytes = 0;
  };
  int32_t Child(int32_t node, uint8_t byte) const;
  Match LongestAt(std::string_view text, size_t pos) const;

  std::vector<Node> nodes_;  // a trie over bytes, root first
  std::vector<AddedToken> tokens_;
};

}  // namespace spl::tokenizer
