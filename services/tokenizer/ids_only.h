// The tokenizer of a model that has none (random weights): token ids go through, text does not.
#pragma once

#include <memory>

#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

// vocab_size() is 0. Encode is InvalidArgument with a message that asks for token ids; ids decode to no text.
std::unique_ptr<Tokenizer> MakeIdsOnlyTokenizer();

}  // namespace spl::tokenizer
