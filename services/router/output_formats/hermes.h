// Calls as <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen2.5, Qwen3.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Arguments come out while they are written (JsonCallReader). Text between the object and the end tag is content.
std::unique_ptr<OutputParser> MakeHermes(const CallableTools& tools);

absl::StatusOr<GrammarPart> HermesGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsHermes(std::string_view chat_template);

}  // namespace spl::router
