// Quality that a request asks of its method, ReuseOptions.quality, and reasons of a choice that more than the engine
// knows, ChoiceReceipt.why.
#pragma once

#include <optional>
#include <string_view>

namespace spl::methods {

struct Quality {
  bool strict = false;   // everything is exact
  double agreement = 0;  // the contract: share of first tokens that must be exact's, below 1; 0: none
};

inline constexpr std::string_view kNothingToCopy = "nothing_to_copy";  // no copies: everything is computed
inline constexpr std::string_view kLittleToGain = "little_to_gain";    // no method saves enough: likewise
inline constexpr std::string_view kSameContext = "same_context";       // nothing of the copies is recovered
inline constexpr std::string_view kClearlyBad = "clearly_bad";         // its record proves that the method is bad

// Takes "" and "balanced", "strict", and a number in (0, 1]; 1 is strict. Null: it is none of these.
std::optional<Quality> ParseQuality(std::string_view text);

}  // namespace spl::methods
