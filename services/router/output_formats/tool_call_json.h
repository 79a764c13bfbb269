// A call of a tool as a JSON object.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Reads {"name": NAME, "arguments": {…}}, or with "parameters" for "arguments"; arguments may also be the text of an
// object. Absent ones are {}, unless `needs_arguments`. The call has no id and the index 0. Nothing: it is no such
// object. Never throws.
std::optional<ToolCallDelta> ReadToolCall(std::string_view json, bool needs_arguments);

// Reads such an object, or a list of them, one at least. Nothing: one of them is no call. REQUIRES: `json` is what
// BracketLength measures.
std::optional<std::vector<ToolCallDelta>> ReadToolCalls(std::string_view json, bool needs_arguments);

// The part of a call in front of its arguments.
struct CallHead {
  enum State { kMore, kNone, kFound };
  State state = kNone;
  std::string name;
  size_t arguments = 0;  // where their bracket stands
};

// Looks at the beginning of an object for its name and behind that, within 1 KiB, for the bracket of its arguments.
// kMore: not yet. kNone: no object that begins with this text has them so (the name comes later, the arguments are
// text, another object stands in front of them). Which one it is depends on the text alone, not on where it ends.
// REQUIRES: text begins with {.
CallHead ReadCallHead(std::string_view text);

bool IsJsonObject(std::string_view text);

// The length of the JSON object or list that `text` begins with, brackets counted outside of strings; nothing: it does
// not end in it. REQUIRES: text begins with { or [.
std::optional<size_t> BracketLength(std::string_view text);

}  // namespace spl::router
