// Sets of positions as ascending, disjoint, non-empty ranges.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/selection/sparsex/column_scores.h"

namespace spl::engine {

using kernels::PositionRange;
using PositionRanges = std::vector<PositionRange>;

// Sorts, joins ranges that overlap or touch, and drops empty ones. `ranges` may be in any order.
PositionRanges MergeRanges(PositionRanges ranges);
PositionRanges UnionOf(std::span<const PositionRange> a, std::span<const PositionRange> b);
PositionRanges IntersectionOf(std::span<const PositionRange> a, std::span<const PositionRange> b);
// The part of `within` that is not in `ranges`.
PositionRanges ComplementOf(std::span<const PositionRange> ranges, PositionRange within);
// The part of `ranges` that is in `only`, renumbered: the positions of `only` count 0, 1, …. Ranges that then touch
// become one.
PositionRanges NumberedWithin(std::span<const PositionRange> ranges, std::span<const PositionRange> only);
// From numbers within `ranges` (NumberedWithin) back to positions, in place. Both ascend.
void ToPositions(std::span<int32_t> numbers, std::span<const PositionRange> ranges);
// The ranges of these ascending positions.
PositionRanges RangesOf(std::span<const int32_t> positions);
int64_t CountOf(std::span<const PositionRange> ranges);
bool ContainsPosition(std::span<const PositionRange> ranges, int32_t position);

}  // namespace spl::engine
