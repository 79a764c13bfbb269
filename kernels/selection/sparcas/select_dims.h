// Step (a) of SelectTokens on the host: the dimensions that a refresh chooses, and the slots that change.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace spl::kernels {

// q [group, head_dim] of one KV head. `before` [num_dims]: the last choice, null the first time. Writes `after`
// [num_dims]. Returns the slots whose dimension has changed, ascending.
std::vector<int32_t> SelectDims(const float* q, int32_t group, int32_t head_dim, int32_t num_dims,
                                const int32_t* before, int32_t* after);

}  // namespace spl::kernels
