#include "services/text/utf8.h"

namespace spl::text {
namespace {

enum class SequenceKind { kValid, kInvalid, kIncomplete };

struct Sequence {
  SequenceKind kind = SequenceKind::kValid;
  size_t num_bytes = 0;  // bytes of the character, or of the maximal part that cannot start one
};

// Length that the first byte announces, and the range of the second byte, which excludes overlong forms, surrogates and
// values above U+10FFFF.
Sequence ScanSequence(std::string_view bytes, size_t pos) {
  const auto first = static_cast<unsigned char>(bytes[pos]);
  if (first < 0x80) return {SequenceKind::kValid, 1};
  if (first < 0xC2 || first > 0xF4) return {SequenceKind::kInvalid, 1};
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (size_t i = 1; i < length; ++i) {
    if (pos + i >= bytes.size()) return {SequenceKind::kIncomplete, i};
    const auto byte = static_cast<unsigned char>(bytes[pos + i]);
    if (byte < low || byte > high) return {SequenceKind::kInvalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {SequenceKind::kValid, length};
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const Sequence sequence = ScanSequence(text, pos);
    if (sequence.kind != SequenceKind::kValid) return pos;
    pos += sequence.num_bytes;
  }
  return std::string_view::npos;
}

CodePoint DecodeUtf8(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[pos + i])); };
  const char32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  if (first < 0xE0) return {(first & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (first < 0xF0) return {(first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}

void AppendUtf8(char32_t value, std::string* out) {
  if (value < 0x80) {
    out->push_back(static_cast<char>(value));
  } else if (value < 0x800) {
    out->push_back(static_cast<char>(0xC0 | value >> 6));
    out->push_back(static_cast<char>(0x80 | (value & 0x3F)));
  } else if (value < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | value >> 12));
    out->push_back(static_cast<char>(0x80 | (value >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (value & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | value >> 18));
    out->push_back(static_cast<char>(0x80 | (value >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (value >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (value & 0x3F)));
  }
}

size_t AppendLossyUtf8(std::string_view bytes, bool final, std::string* out) {
  size_t pos = 0;
  while (pos < bytes.size()) {
    const Sequence sequence = ScanSequence(bytes, pos);
    if (sequence.kind == SequenceKind::kIncomplete && !final) return pos;
    if (sequence.kind == SequenceKind::kValid) {
      out->append(bytes.substr(pos, sequence.num_bytes));
    } else {
      out->append(kReplacementCharacter);
    }
    pos += sequence.num_bytes;
  }
  return pos;
}

bool IsWhitespace(char32_t value) {
  if (value < 0x80) return value == ' ' || (value >= '\t' && value <= '\r');
  return value == 0x85 || value == 0xA0 || value == 0x1680 || (value >= 0x2000 && value <= 0x200A) || value == 0x2028 ||
         value == 0x2029 || value == 0x202F || value == 0x205F || value == 0x3000;
}

}  // namespace spl::text
