// The tokenizer of a model that has none (random weights): such a model takes token ids, but no text.
#pragma once

#include <memory>

#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

// Encode fails with InvalidArgument, whose message asks for token ids. Decode gives no text. vocab_size() is 0.
std::unique_ptr<Tokenizer> MakeIdsOnlyTokenizer();

}  // namespace spl::tokenizer
