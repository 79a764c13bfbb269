// Python's str methods, as far as templates use them. Positions and lengths are in code points; all text is valid
// UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::tokenizer::jinja {

bool IsPythonSpace(char32_t value);  // str.isspace

int64_t LengthOf(std::string_view text);

// Byte offset of the first `part` in `text` from byte `from` on. REQUIRES: from <= text.size(). Cost: linear in both,
// unlike std::string::find. npos: there is none.
size_t FindText(std::string_view text, std::string_view part, size_t from);

// REQUIRES: the text is not empty.
std::string_view FirstCharacter(std::string_view text);
std::string_view LastCharacter(std::string_view text);

enum class StripSide { kBoth, kLeft, kRight };
// str.strip(characters); `characters` null: str.strip().
std::string Strip(std::string_view text, const std::string* characters, StripSide side);

// str.split(separator, max_splits). InvalidArgument: an empty separator, or more than kListItemsMax parts. `separator`
// null: splits at runs of whitespace. max_splits < 0: no limit.
absl::StatusOr<std::vector<std::string>> Split(std::string_view text, const std::string* separator, int64_t max_splits);
absl::StatusOr<std::vector<std::string>> SplitFromRight(std::string_view text, const std::string* separator,
                                                        int64_t max_splits);
absl::StatusOr<std::vector<std::string>> SplitLines(std::string_view text);

// str.replace(from, to, max_count); InvalidArgument: `from` is empty.
absl::StatusOr<std::string> Replace(std::string_view text, std::string_view from, std::string_view to,
                                    int64_t max_count);

enum class Case { kUpper, kLower, kCapitalize, kTitle, kJinjaTitle };
// str.upper and so on; kJinjaTitle is Jinja's filter `title`, which turns "it's" into "It's". InvalidArgument:
// characters beyond ASCII that have case, because this build has no mapping for them.
absl::StatusOr<std::string> ChangeCase(std::string_view text, Case mode);

// Python's repr of a float, which is also its str.
std::string FloatText(double value);

// repr of a string, and the string as json.dumps writes it.
std::string QuotePython(std::string_view text);
std::string QuoteJson(std::string_view text, bool ensure_ascii);

}  // namespace spl::tokenizer::jinja
