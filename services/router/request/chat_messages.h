// Reads the messages of a chat body, and the other inputs of its chat template.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/request.h"

namespace spl::router {

// Upper bounds. Everything else is bounded by the size of the body.
inline constexpr size_t kMaxTools = 1024;
inline constexpr size_t kMaxToolNameBytes = 128;
inline constexpr size_t kMaxTemplateVariables = 256;  // in chat_template_kwargs: each is searched for in the template

// Reads "messages" into `chat`. InvalidArgument names the field.
//   role         system, developer, user, assistant or tool
//   content      a string, a list of parts, or null in an assistant message that needs none
//   tool_calls   each of type "function" with a name, and arguments that are a string or an object
// Other members that are not null are passed to the template. Members that would have to change the prompt (audio,
// function_call) are refused.
absl::Status ReadMessages(const Json* messages, ChatPrompt* chat);

// Reads the top-level members that shape the prompt: tools, documents, chat_template_kwargs, reasoning_effort,
// add_generation_prompt, continue_final_message.
void ReadTemplateFields(ObjectReader& reader, ChatPrompt* chat);

}  // namespace spl::router
