// Translates patterns. Those of tokenizer.json are written for Oniguruma (Ruby syntax), but Splice runs PCRE2. Most of
// the syntax is the same; constructs that differ are rewritten, or refused if they cannot be rewritten exactly.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl::text {

// Rewritten are: \s \S to Unicode White_Space (PCRE2 adds U+180E), \w \W \b \B to Ruby's word characters, \h \H to hex
// digits, \uHHHH, {,n}, and the inline flag m (dot matches newlines) to PCRE2's s. InvalidArgument names the construct:
// set operations and sets inside a set, \W or \H inside a set, possessive or lazy marks on an interval (both mean
// something else in Ruby), raw bytes above 0x7F. The result is meant for PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE with
// LF as the only newline.
absl::StatusOr<std::string> OnigurumaToPcre2(std::string_view pattern);

}  // namespace spl::text
