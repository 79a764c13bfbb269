// Score pooling on a device; the contract is pool_scores.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/selection/sparsex/pool_scores.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`.
cudaError_t PoolScores(const PoolScoresArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
