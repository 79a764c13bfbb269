// Step (a) of SelectTokens on the host: which dimensions a refresh chooses, and which slots change.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"

namespace spl::kernels {

// q [group, head_dim] of one KV head. `before` is null the first time. Writes `after` [num_dims]; returns the slots
// whose dimension is another one now, ascending.
std::vector<int32_t> SelectDims(const float* q, int32_t group, int32_t head_dim, int32_t num_dims,
                                const int32_t* before, int32_t* after);

}  // namespace spl::kernels
