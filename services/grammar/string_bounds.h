// Bounds of the lengths of strings in a schema, which a grammar over tokens has to count.
#pragma once

#include <cstdint>
#include <optional>

#include "services/grammar/token_grammar.h"

namespace spl::grammar {

// A grammar like another one, in which strings may have any length.
struct UnboundedStrings {
  GrammarSpec spec;
  int64_t shortest = 0;  // characters of the smallest maxLength; the largest int64_t: there is none
  // Several schemas, one of them with a bound, may read the same text: more than strings can be too much in a mask.
  bool overlaps = false;
};

// The grammar with patterns instead of minLength and maxLength: the same strings, but for control characters, which
// JSON has only as escapes. Where there are none, it is as it was.
GrammarSpec WithBoundsAsPatterns(const GrammarSpec& spec);

// The schema, or the structural tag with its schemas, without minLength and maxLength. Nothing: there are none; or a
// value could be read by two schemas of an anyOf or oneOf, one of them with such a bound, that cannot be counted
// together (string_overlaps.h). REQUIRES: CheckGrammarSpec took it.
std::optional<UnboundedStrings> WithoutStringBounds(const GrammarSpec& spec);

}  // namespace spl::grammar
