// UTF-8 for the tokenizer: validation with an offset, code points, and the lossy decoding of the reference.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace spl::text {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

struct CodePoint {
  char32_t value = 0;
  size_t num_bytes = 0;
};

// Offset of the first byte that is not part of a well-formed character; npos: `text` is valid.
size_t FindInvalidUtf8(std::string_view text);

// The character at `pos`. REQUIRES: `text` is valid, pos < text.size() and on a character boundary.
CodePoint DecodeUtf8(std::string_view text, size_t pos);

void AppendUtf8(char32_t value, std::string* out);

// Appends `bytes` to `out`, with U+FFFD for each maximal part that cannot be UTF-8. Returns the number of bytes that
// were consumed: all if `final`; otherwise all except the start of a character that later bytes may still complete (at
// most 3 bytes).
size_t AppendLossyUtf8(std::string_view bytes, bool final, std::string* out);

// True for Unicode White_Space, which both the reference tokenizer and Python's str methods strip.
bool IsWhitespace(char32_t value);

}  // namespace spl::text
