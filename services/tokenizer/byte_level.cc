#include "services/tokenizer/byte_level.h"

#include <array>

#include "services/text/utf8.h"

namespace spl::tokenizer {
namespace {

constexpr int kNumChars = 256 + 68;  // the highest character is U+0143

struct Alphabet {
  std::array<char32_t, 256> char_of{};
  std::array<int16_t, kNumChars> byte_of{};
};

constexpr bool IsPrintableLatin1(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr Alphabet MakeAlphabet() {
  Alphabet alphabet;
  for (auto& byte : alphabet.byte_of) byte = -1;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const int value = IsPrintableLatin1(byte) ? byte : next++;
    alphabet.char_of[byte] = static_cast<char32_t>(value);
    alphabet.byte_of[value] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = MakeAlphabet();

}  // namespace

char32_t CharOfByte(uint8_t byte) { return kAlphabet.char_of[byte]; }

std::optional<uint8_t> ByteOfChar(char32_t value) {
  if (value >= kNumChars || kAlphabet.byte_of[value] < 0) return std::nullopt;
  return static_cast<uint8_t>(kAlphabet.byte_of[value]);
}

std::string BytesToChars(std::string_view bytes) {
  std::string chars;
  chars.reserve(bytes.size() * 2);
  for (const char byte : bytes) text::AppendUtf8(CharOfByte(static_cast<uint8_t>(byte)), &chars);
  return chars;
}

std::optional<std::string> CharsToBytes(std::string_view chars) {
  std::string bytes;
  bytes.reserve(chars.size());
  for (size_t pos = 0; pos < chars.size();) {
    const text::CodePoint c = text::DecodeUtf8(chars, pos);
    const std::optional<uint8_t> byte = ByteOfChar(c.value);
    if (!byte) return std::nullopt;
    bytes.push_back(static_cast<char>(*byte));
    pos += c.num_bytes;
  }
  return bytes;
}

}  // namespace spl::tokenizer
