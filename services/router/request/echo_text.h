// The text that an echo puts in front of an answer.
#pragma once

#include <string>

#include "services/router/request/request.h"
#include "services/router/request/served_model.h"

namespace spl::router {

// `prompt` as text. A text is itself; ids and segments come back through the tokenizer, so documents of knowledge bases
// must have been resolved. `request` says how special tokens are treated. Empty if the prompt cannot be tokenized: the
// request then fails for the same reason. Costs what tokenizing costs; not for I/O threads.
std::string EchoText(const ServedModel& model, const GenerationRequest& request, const Prompt& prompt);

}  // namespace spl::router
