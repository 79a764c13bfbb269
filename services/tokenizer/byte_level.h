// The byte-level alphabet: each byte is written as one printable character, so that a vocabulary of text can hold
// bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spl::tokenizer {

// Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up, in order.
char32_t CharOfByte(uint8_t byte);

// The byte that a character stands for; nothing if it stands for none.
std::optional<uint8_t> ByteOfChar(char32_t value);

std::string BytesToChars(std::string_view bytes);

// The bytes that valid UTF-8 `chars` stands for; nothing if any of its characters stands for none.
std::optional<std::string> CharsToBytes(std::string_view chars);

}  // namespace spl::tokenizer
