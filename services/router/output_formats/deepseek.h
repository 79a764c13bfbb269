// Calls between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>: DeepSeek.
//
//   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line end, {…} between ```json and ```, <｜tool▁call▁end｜> V3,
//   R1 <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>                                              V3.1
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Takes both forms. A call begins where the bracket of its arguments does, and they come out while they are written.
// Text between them and the end of the call is content. The tags may be special tokens, which must be in the text
// (NeedsSpecialTokens).
std::unique_ptr<OutputParser> MakeDeepSeek(const CallableTools& tools);

// Either form, as the model likes.
absl::StatusOr<GrammarPart> DeepSeekGrammar(const ForcedTools& tools);

// True for a template that asks for this format.
bool IsDeepSeek(std::string_view chat_template);

}  // namespace spl::router
