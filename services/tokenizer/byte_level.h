// The byte-level alphabet writes each byte as one printable character, so that a vocabulary of text can hold bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spl::tokenizer {

// Printable Latin-1 bytes are their own characters; the other 68 are U+0100 and up, in order.
char32_t CharOfByte(uint8_t byte);

// The byte of a character; nullopt: the character is not in the alphabet.
std::optional<uint8_t> ByteOfChar(char32_t value);

std::string BytesToChars(std::string_view bytes);

// The bytes of `chars`, valid UTF-8; nullopt: one of the characters is not in the alphabet.
std::optional<std::string> CharsToBytes(std::string_view chars);

}  // namespace spl::tokenizer
