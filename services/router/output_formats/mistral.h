// Calls behind [TOOL_CALLS]: Mistral.
//
//   [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]             7B v0.3, Nemo
//   [TOOL_CALLS]NAME{…}[TOOL_CALLS]NAME{…}                       Small 3.1
//   [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}                         Small 3.2
//   [TOOL_CALLS]NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}           Devstral and later
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Arguments come out while they are written: behind a name, and in a list as JsonCallReader tells. A list ends in front
// of an object that is no call, and from there on there is text. Ids are the last nine characters of those of
// `make_id`: the templates take no others, and a model's own need not be unlike all others. The tags are special
// tokens, which must be in the text (NeedsSpecialTokens).
std::unique_ptr<OutputParser> MakeMistral(const CallableTools& tools);

// With [ARGS] where that is a token of the model; else a list, or a name and its arguments, as the model likes.
absl::StatusOr<GrammarPart> MistralGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsMistral(std::string_view chat_template);

}  // namespace spl::router
