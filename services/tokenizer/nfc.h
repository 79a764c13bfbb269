// Unicode Normalization Form C, for tokenizers that ask for it (Qwen).
#pragma once

#include <string>
#include <string_view>

namespace spl::tokenizer {

// REQUIRES: valid UTF-8. Characters that are newer than utf8proc's tables (2.8: Unicode 15) stay as they are. Cost:
// linear, except that runs of combining marks are sorted; text below U+0300 is only scanned.
std::string ToNfc(std::string_view text);

}  // namespace spl::tokenizer
