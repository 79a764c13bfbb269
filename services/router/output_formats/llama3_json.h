// Calls as bare JSON objects, {"name": …, "parameters": {…}}, with ";" between them: Llama 3.x.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// An answer that does not begin with an object has no calls. An object is a call if it has a name and parameters; it
// comes out when it is complete. <|python_tag|> in front of the first one is dropped.
std::unique_ptr<OutputParser> MakeLlama3Json(const CallableTools& tools);

absl::StatusOr<GrammarPart> Llama3JsonGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsLlama3Json(std::string_view chat_template);

}  // namespace spl::router
