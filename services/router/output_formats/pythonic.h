// Calls as a list that Python could run, [f(a=1, b="x"), g()]: Llama 3.2 and 4, ToolACE and others.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// The answer begins with the list, or the list stands between <|python_start|> and <|python_end|>, which are special
// tokens (NeedsSpecialTokens). Calls come out when the list is complete, and all of it are calls, or none
// (ReadPythonCalls).
std::unique_ptr<OutputParser> MakePythonic(const CallableTools& tools);

// Texts, lists and dicts are as JSON has them. InvalidArgument: a name is none of Python's.
absl::StatusOr<GrammarPart> PythonicGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsPythonic(std::string_view chat_template);

}  // namespace spl::router
