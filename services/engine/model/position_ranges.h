// Sets of positions as ascending, disjoint, non-empty ranges.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/selection/sparsex/column_scores.h"

namespace spl::engine {

using kernels::PositionRange;
using PositionRanges = std::vector<PositionRange>;

// Ranges that overlap or touch become one; empty ones vanish. Any order.
PositionRanges MergeRanges(PositionRanges ranges);
PositionRanges UnionOf(std::span<const PositionRange> a, std::span<const PositionRange> b);
PositionRanges IntersectionOf(std::span<const PositionRange> a, std::span<const PositionRange> b);
// What of `within` is not in `ranges`.
PositionRanges ComplementOf(std::span<const PositionRange> ranges, PositionRange within);
// What of `ranges` is in `only`, numbered as if nothing but `only` were there: positions of `only` count from 0. Ranges
// that then touch are one.
PositionRanges NumberedWithin(std::span<const PositionRange> ranges, std::span<const PositionRange> only);
// Ascending positions as ranges.
PositionRanges RangesOf(std::span<const int32_t> positions);
int64_t CountOf(std::span<const PositionRange> ranges);
bool ContainsPosition(std::span<const PositionRange> ranges, int32_t position);

}  // namespace spl::engine
