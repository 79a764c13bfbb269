// Translates bodies of Anthropic's POST /v1/messages into chats.
#pragma once

#include "absl/status/statusor.h"
#include "services/router/request/translated_request.h"

namespace spl::router {

// InvalidArgument names the client's field. docs/api.md lists the accepted, ignored and refused fields.
//
//   system                       the first message, of role system
//   tool_use, thinking           tool_calls and reasoning_content of an answer
//   tool_result                  a message of role tool, in its place among the others
//   an answer as last message    is continued
//   input_schema, tool_choice    parameters of functions; any is required, tool names a function
//   output_config.format         response_format
//   thinking                     the template's enable_thinking
absl::StatusOr<TranslatedRequest> TranslateMessages(const Json& body);

}  // namespace spl::router
