// Calls as <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>: Qwen3-Coder.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Values have the types that ArgumentList::Set tells. One line end at either end of a value is not part of it.
std::unique_ptr<OutputParser> MakeQwen3Coder(const CallableTools& tools);

// Texts where IsRawText says so, else JSON.
absl::StatusOr<GrammarPart> Qwen3CoderGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsQwen3Coder(std::string_view chat_template);

}  // namespace spl::router
