// Unicode Normalization Form C, for tokenizers that ask for it (Qwen).
#pragma once

#include <string>
#include <string_view>

namespace spl::tokenizer {

// Whether `text` holds only characters that NFC never changes, wherever they stand. Cost: one pass, no allocation.
bool IsTriviallyNfc(std::string_view text);

// REQUIRES: valid UTF-8. Characters newer than the tables (their first line says which Unicode) stay as they are.
std::string ToNfc(std::string_view text);

}  // namespace spl::tokenizer
