// Quality that a request asks of its method: ReuseOptions.quality.
#pragma once

#include <optional>
#include <string_view>

namespace spl::methods {

struct Quality {
  bool strict = false;   // everything is exact
  double agreement = 0;  // the contract: share of first tokens that must be exact's, below 1; 0: none
};

// Takes "" and "balanced", "strict", and a number in (0, 1]; 1 is strict. Null: it is none of these.
std::optional<Quality> ParseQuality(std::string_view text);

}  // namespace spl::methods
