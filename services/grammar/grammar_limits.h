// Bounds of what a grammar may ask of the compiler, checked before it runs.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {

inline constexpr size_t kMaxGrammarBytes = 256 << 10;
inline constexpr int kMaxGrammarDepth = 64;  // nested objects and lists in JSON, parentheses elsewhere
inline constexpr size_t kMaxChoices = 4096;
inline constexpr int kMaxExpansion = 50'000;  // the size of an expression with its repetitions written out

// InvalidArgument: the text is beyond one of these, which the message names; a choice is no list of strings; a schema,
// or one in a structural tag, has a word that is not kept to (json_schema_check.h). Cost: linear in the text. These are
// the errors that can be told at once: what the compiler takes is bounded by its own budget (work_budget.h).
absl::Status CheckGrammarSpec(const GrammarSpec& spec);

}  // namespace spl::grammar
