#include "services/tokenizer/added_tokens.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/text/regex.h"
#include "services/text/utf8.h"
#include "services/tokenizer/bpe.h"

namespace spl::tokenizer {
namespace {

// True if \w of the reference matches this character.
bool IsWordCharacter(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (first < 0x80) return std::isalnum(first) || first == '_';
  static const text::Regex* const word = new text::Regex(*text::Regex::Compile("\\w"));
  std::vector<text::Span> matches;
  return word->FindAll(character, &matches).ok() && !matches.empty();
}

// Start of the last character of `text`. REQUIRES: not empty.
size_t LastCharacter(std::string_view text) {
  size_t pos = text.size() - 1;
  while (pos > 0 && (static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80) --pos;
  return pos;
}

size_t SkipSpaceBackward(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t pos = LastCharacter(text.substr(0, end));
    if (!text::IsWhitespace(text::DecodeUtf8(text, pos).value)) break;
    end = pos;
  }
  return end;
}

size_t SkipSpaceForward(std::string_view text, size_t pos) {
  while (pos < text.size()) {
    const text::CodePoint c = text::DecodeUtf8(text, pos);
    if (!text::IsWhitespace(c.value)) break;
    pos += c.num_bytes;
  }
  return pos;
}

bool InsideWord(std::string_view text, size_t begin, size_t end) {
  if (begin > 0) {
    const size_t pos = LastCharacter(text.substr(0, begin));
    if (IsWordCharacter(text.substr(pos, begin - pos))) return true;
  }
  return end < text.size() && IsWordCharacter(text.substr(end, text::DecodeUtf8(text, end).num_bytes));
}

}  // namespace

absl::StatusOr<AddedToken> ParseAddedToken(const JsonField& field, std::optional<int64_t> id) {
  AddedToken token;
  SPLICE_ASSIGN_OR_RETURN(token.content, field.RequireString("content"));
  if (token.content.empty()) return InvalidArgument("{}.content is empty", field.path);
  if (!id) {
    SPLICE_ASSIGN_OR_RETURN(id, field.IntOr("id", -1));
  }
  if (*id < 0 || *id > kTokenIdMax) {
    return InvalidArgument("{}: the id of \"{}\" is outside 0 to {}", field.path, token.content, kTokenIdMax);
  }
  token.id = static_cast<TokenId>(*id);
  SPLICE_ASSIGN_OR_RETURN(token.special, field.BoolOr("special", false));
  SPLICE_ASSIGN_OR_RETURN(token.normalized, field.BoolOr("normalized", !token.special));
  SPLICE_ASSIGN_OR_RETURN(token.lstrip, field.BoolOr("lstrip", false));
  SPLICE_ASSIGN_OR_RETURN(token.rstrip, field.BoolOr("rstrip", false));
  SPLICE_ASSIGN_OR_RETURN(token.single_word, field.BoolOr("single_word", false));
  return token;
}

int32_t AddedTokenMatcher::Child(int32_t node, uint8_t byte) const {
  const auto& children = nodes_[node].children;
  const auto it = std::lower_bound(children.begin(), children.end(), byte,
                                   [](const std::pair<uint8_t, int32_t>& c, uint8_t b) { return c.first < b; });
  return it != children.end() && it->first == byte ? it->second : -1;
}

void AddedTokenMatcher::Add(const AddedToken& token, std::string_view spelling) {
  if (spelling.empty()) return;  // normalization left nothing to search for
  int32_t node = 0;
  for (const char c : spelling) {
    const auto byte = static_cast<uint8_t>(c);
    int32_t child = Child(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      auto& children = nodes_[node].children;
      children.insert(std::upper_bound(children.begin(), children.end(), std::make_pair(byte, child)), {byte, child});
    }
    node = child;
  }
  // If two normalize to the same text, the first one counts.
  if (nodes_[node].token_idx >= 0) return;
  nodes_[node].token_idx = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

AddedTokenMatcher::Match AddedTokenMatcher::LongestAt(std::string_view text, size_t pos) const {
  Match match;
  int32_t node = 0;
  for (size_t i = pos; i < text.size(); ++i) {
    node = Child(node, static_cast<uint8_t>(text[i]));
    if (node < 0) break;
    if (nodes_[node].token_idx >= 0) match = {nodes_[node].token_idx, i + 1 - pos};
  }
  return match;
}

std::vector<size_t> AddedTokenMatcher::SpecialTokensIn(std::string_view text) const {
  std::vector<size_t> positions;
  for (size_t pos = 0; pos < text.size() && !tokens_.empty(); ++pos) {
    int32_t node = 0;
    for (size_t i = pos; i < text.size(); ++i) {
      node = Child(node, static_cast<uint8_t>(text[i]));
      if (node < 0) break;
      if (nodes_[node].token_idx < 0 || !tokens_[nodes_[node].token_idx].special) continue;
      positions.push_back(pos);
      break;
    }
  }
  return positions;
}

std::vector<TokenSegment> AddedTokenMatcher::Split(std::string_view text, bool parse_special,
                                                   std::span<const size_t> plain_at) const {
  std::vector<TokenSegment> segments;
  size_t done = 0;  // bytes that segments cover
  for (size_t pos = 0; pos < text.size() && !tokens_.empty();) {
    const Match match = LongestAt(text, pos);
    if (match.token_idx < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[match.token_idx];
    size_t begin = pos;
    size_t end = pos + match.num_bytes;
    pos = end;
    if (token.special && !parse_special) continue;
    if (token.special && std::binary_search(plain_at.begin(), plain_at.end(), begin)) {
      pos = begin + 1;  // another token may begin inside of it
      continue;
    }
    if (token.single_word && InsideWord(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(SkipSpaceBackward(text, begin), done);
    if (token.rstrip) end = SkipSpaceForward(text, end);
    if (done < begin) segments.push_back({done, begin, -1});
    segments.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) segments.push_back({done, text.size(), -1});
  return segments;
}

}  // namespace spl::tokenizer
