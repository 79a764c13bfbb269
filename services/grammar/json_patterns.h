// Patterns of strings in JSON schemas, whose characters stand in JSON as they are.
#pragma once

#include <string>
#include <vector>

#include "services/grammar/token_grammar.h"

namespace spl::grammar {

// The grammar with \uXXXX in its patterns for characters beyond ASCII. The compiler keeps characters that JSON has to
// escape out of patterns in ASCII only.
GrammarSpec WithAsciiPatterns(const GrammarSpec& spec);

// Every "pattern" in the schema, or in those of a structural tag. Empty: there is none.
std::vector<std::string> PatternsIn(const GrammarSpec& spec);

}  // namespace spl::grammar
