// Which pages of a prompt's KV are final, so that they can be sent while the rest of the prompt is computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// Ranges of page indices of a stream, as PositionRanges are of positions: ascending, disjoint, not empty.
using PageRange = PositionRange;
using PageRanges = PositionRanges;

// The pages of a prompt of `num_tokens` that hold no position of `rows` and end in front of position `end` or with the
// prompt, whose last page may be partly filled.
PageRanges PagesWithout(std::span<const PositionRange> rows, int32_t num_tokens, int32_t end = INT32_MAX);

// The pages of each layer that were given out. One thread at a time.
class GivenPages {
 public:
  explicit GivenPages(int32_t num_layers) : given_(static_cast<size_t>(num_layers)) {}

  // Gives out those of `pages` that this layer did not give out before: each page once for a layer.
  PageRanges Give(int32_t layer, std::span<const PositionRange> pages);

 private:
  std::vector<PageRanges> given_;  // [num_layers]
};

}  // namespace spl::engine
