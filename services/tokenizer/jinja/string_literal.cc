#include "services/tokenizer/jinja/string_literal.h"

#include <charconv>
#include <utility>

#include "services/base/status.h"
#include "services/text/utf8.h"

namespace spl::tokenizer::jinja {
namespace {

constexpr std::pair<char, char> kSimple[] = {{'n', '\n'}, {'t', '\t'}, {'r', '\r'}, {'\\', '\\'}, {'\'', '\''},
                                             {'"', '"'},  {'a', '\a'}, {'b', '\b'}, {'f', '\f'},  {'v', '\v'}};

// The number of exactly `num_digits` digits at the start of `text`.
absl::StatusOr<uint32_t> Digits(std::string_view text, size_t num_digits, int base) {
  uint32_t value = 0;
  const std::string_view digits = text.substr(0, num_digits);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (digits.size() != num_digits || error != std::errc() || end != digits.data() + digits.size()) {
    return InvalidArgument("the escape in the string is cut short");
  }
  return value;
}

absl::Status AppendCodePoint(uint32_t value, std::string* out) {
  if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
    return InvalidArgument("the escape in the string names no character");
  }
  text::AppendUtf8(value, out);
  return absl::OkStatus();
}

size_t HexDigitsOf(char kind) { return kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0; }

bool IsOctal(char c) { return c >= '0' && c <= '7'; }

// The escape at the start of `text` (which begins after the backslash). Returns the bytes it takes.
absl::StatusOr<size_t> Unescape(std::string_view text, std::string* out) {
  const char kind = text[0];
  for (const auto& simple : kSimple) {
    if (simple.first != kind) continue;
    *out += simple.second;
    return 1;
  }
  if (kind == '\n') return 1;  // a continued line
  if (const size_t num_digits = HexDigitsOf(kind)) {
    SPLICE_ASSIGN_OR_RETURN(const uint32_t value, Digits(text.substr(1), num_digits, 16));
    SPLICE_RETURN_IF_ERROR(AppendCodePoint(value, out));
    return 1 + num_digits;
  }
  if (IsOctal(kind)) {
    size_t num_digits = 1;
    while (num_digits < 3 && num_digits < text.size() && IsOctal(text[num_digits])) ++num_digits;
    SPLICE_ASSIGN_OR_RETURN(const uint32_t value, Digits(text, num_digits, 8));
    SPLICE_RETURN_IF_ERROR(AppendCodePoint(value, out));
    return num_digits;
  }
  if (kind == 'N') return InvalidArgument("the escape \\N is not supported");
  *out += '\\';
  return 0;
}

}  // namespace

absl::StatusOr<std::string> UnescapeString(std::string_view literal) {
  std::string out;
  for (size_t pos = 0; pos < literal.size();) {
    if (literal[pos] != '\\' || pos + 1 >= literal.size()) {
      out += literal[pos++];
      continue;
    }
    SPLICE_ASSIGN_OR_RETURN(const size_t num_bytes, Unescape(literal.substr(pos + 1), &out));
    pos += 1 + num_bytes;
  }
  return out;
}

}  // namespace spl::tokenizer::jinja
