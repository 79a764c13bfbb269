// Bounds of what a grammar may ask of the compiler, checked before it runs.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {

inline constexpr size_t kMaxGrammarBytes = 256 << 10;
inline constexpr int kMaxGrammarDepth = 64;  // nested objects and lists in JSON, parentheses elsewhere
inline constexpr size_t kMaxChoices = 4096;

// InvalidArgument: the text is longer or deeper than that, a choice is no list of strings, or a list is empty. Cost:
// linear in the text.
absl::Status CheckGrammarSpec(const GrammarSpec& spec);

}  // namespace spl::grammar
