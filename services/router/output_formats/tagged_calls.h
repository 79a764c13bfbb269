// Calls between <tool_call> and </tool_call>, whatever stands there: what several formats have in common.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Reads the text between two tags. The call has no id and the index 0. Nothing: it is no call.
using ReadCall = std::function<std::optional<ToolCallDelta>(std::string_view text)>;

// A call comes out when its end is there, because only then it is known to be one. A call that the answer's end cuts
// off behind its own end is one, too. `tags_inside`: an end tag may stand in the text of a call, which goes on to the
// first one in front of which it is a call.
std::unique_ptr<OutputParser> MakeTaggedCalls(ReadCall read, MakeCallId make_id, bool tags_inside);

inline constexpr std::string_view kCallStart = "<tool_call>", kCallEnd = "</tool_call>";

}  // namespace spl::router
