// Structured output of chats whose format puts a header in front of the answer.
#pragma once

#include "absl/status/status.h"
#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/registry.h"
#include "services/router/request/openai_request.h"

namespace spl::router {

// Puts the format's reasoning and header into the grammar of a chat's answer and sets `framed`, so that only what comes
// behind them is held to the form that was asked for. Changes nothing where calls are forced, whose grammar has the
// header; where the answer goes on with a message of the prompt; with a structural tag, which says itself what stands
// in front; and in other formats. InvalidArgument names the field: its text is not served (CheckGrammarSpec).
absl::Status FrameAnswer(const OutputFormat& format, const SpecialTokenId& special, ApiRequest& request);

}  // namespace spl::router
