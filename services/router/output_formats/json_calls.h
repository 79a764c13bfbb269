// Calls as JSON, {"name": …, "arguments": {…}} or a list of such objects, between ```json and ``` or not: models
// without a form of their own.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// An answer that does not begin with JSON has no calls. An object is a call if it has a name and arguments, or
// parameters; of a list all objects are calls, or the list is content. Calls come out when their JSON is complete.
// White space, commas and semicolons may stand between them.
std::unique_ptr<OutputParser> MakeJsonCalls(const CallableTools& tools);

// Objects, one behind the other.
absl::StatusOr<GrammarPart> JsonCallsGrammar(const ForcedTools& tools);

}  // namespace spl::router
