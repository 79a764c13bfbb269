// Calls as <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen2.5, Qwen3.
#pragma once

#include <memory>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// A call comes out when its end is there, because only then it is known to be one. A call that the answer's end cuts
// off after its JSON is complete is one, too.
std::unique_ptr<OutputParser> MakeHermes(MakeCallId make_id);

// True for a template that asks for this format.
bool IsHermes(std::string_view chat_template);

}  // namespace spl::router
