// Value deviation on a device; the contract is value_deviation.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/rope/rope_cuda.h"
#include "kernels/selection/cacheblend/value_deviation.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`; reads `batch` instead of args.rows, except for the row numbers. qkv is f32.
cudaError_t ValueDeviation(const ValueDeviationArgs& args, const RopeBatch& batch, cudaStream_t stream);

}  // namespace spl::kernels::cuda
