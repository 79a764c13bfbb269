// Calls of functions as Python writes them: [f(a=1, b="x"), g()].
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Reads a list of calls whose arguments have names and are literals: texts, numbers as JSON has them, True, False,
// None, lists, tuples and dicts with texts for keys. Tuples become lists. The calls have no ids and the index 0.
// Nothing: it is no such list, it is empty, or literals are nested more than 64 deep. REQUIRES: all of `text` is the
// list. `json_texts`: texts are as JSON has them, and stay as they are.
std::optional<std::vector<ToolCallDelta>> ReadPythonCalls(std::string_view text, bool json_texts = false);

// True if a list of calls may begin with `text`, which begins with [: a name and a bracket follow, as far as it goes.
// `certain`: they are there.
bool MayBePythonCalls(std::string_view text, bool* certain);

}  // namespace spl::router
