// Chooses the rows of a pass that run through feed-forward (RedKnot 3.3; docs/methods/redknot.md, "Sparse
// feed-forward").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spl::engine {

// The smallest set of the largest values whose share of the sum reaches `mass`, including the value that crosses it.
// Equal values are taken by ascending index. At least one; all if every value is zero or mass >= 1. `importance` is not
// negative. Returns ascending indices. Cost: linear in importance.size(), on average.
std::vector<int32_t> RowsByMass(std::span<const float> importance, double mass);

}  // namespace spl::engine
