// String literals of templates, with Python's rules.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl::tokenizer::jinja {

// Resolves the escapes in `literal`, the text between the quotes. An unknown escape keeps its backslash, as in Python.
// InvalidArgument: an escape that is cut short, names no character, or is \N{…}.
absl::StatusOr<std::string> UnescapeString(std::string_view literal);

}  // namespace spl::tokenizer::jinja
