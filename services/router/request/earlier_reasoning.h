// Reasoning of earlier turns, under the name by which a chat template reads it.
#pragma once

#include <vector>

#include "services/tokenizer/chat_template.h"

namespace spl::router {

// Clients send it as `reasoning_content`; the template of gpt-oss reads `thinking`. Gives each answer that has the
// first and not the second the second, too, if the template reads that and not the first; not an answer with both
// content and calls, which that template refuses.
void NameReasoning(const tokenizer::ChatTemplate& chat_template, std::vector<tokenizer::ChatMessage>* messages);

}  // namespace spl::router
