// Calls as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>: GLM-4.5 and later.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Values have the types that ArgumentList::Set tells.
std::unique_ptr<OutputParser> MakeGlm4(const CallableTools& tools);

// Texts where IsRawText says so, else JSON.
absl::StatusOr<GrammarPart> Glm4Grammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsGlm4(std::string_view chat_template);

}  // namespace spl::router
