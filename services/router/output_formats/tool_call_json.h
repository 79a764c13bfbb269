// A call of a tool as a JSON object.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Reads {"name": NAME, "arguments": {…}}, or with "parameters" for "arguments"; arguments may also be the text of an
// object. Absent ones are {}, unless `needs_arguments`. The call has no id and the index 0. Nothing: it is no such
// object. Never throws.
std::optional<ToolCallDelta> ReadToolCall(std::string_view json, bool needs_arguments);

bool IsJsonObject(std::string_view text);

// The length of the JSON object or list that `text` begins with, brackets counted outside of strings; nothing: it does
// not end in it. REQUIRES: text begins with { or [.
std::optional<size_t> BracketLength(std::string_view text);

}  // namespace spl::router
