// The "added_tokens" of tokenizer.json: tokens that are searched for in the text before all other processing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/json_field.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // matched after normalization, not before
  bool lstrip = false;       // the match includes whitespace before it
  bool rstrip = false;       // the match includes whitespace after it
  bool single_word = false;  // does not match inside a word
};

// Parses one entry. Its id is `id` if the file keys entries by it, otherwise the member "id".
absl::StatusOr<AddedToken> ParseAddedToken(const JsonField& field, std::optional<int64_t> id);

// Bytes [begin, end) of a text, which are the token `id`; -1: plain text.
struct TokenSegment {
  size_t begin = 0;
  size_t end = 0;
  TokenId id = -1;
};

// Finds added tokens: the leftmost first, and the longest of those that begin there. Immutable after the last Add, then
// any thread.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() : nodes_(1) {}

  // `spelling`: the text to search for, which is the content or its normalized form.
  void Add(const AddedToken& token, std::string_view spelling);
  bool empty() const { return tokens_.empty(); }

  // Cuts `text` (valid UTF-8) into segments, in order. A special token is plain text unless `parse_special`, and also
  // if it begins at one of `plain_at` (ascending byte offsets). Cost: at worst O(bytes of text × longest token); one
  // table look-up for a byte that starts no token.
  std::vector<TokenSegment> Split(std::string_view text, bool parse_special,
                                  std::span<const size_t> plain_at = {}) const;
  // Byte offsets at which special tokens begin, ascending, including overlapping ones.
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
