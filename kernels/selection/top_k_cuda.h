// TopK on a device; the contract is top_k.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/selection/top_k.h"

namespace spl::kernels::cuda {

cudaError_t TopK(const TopKArgs& args, cudaStream_t stream);  // asynchronous on `stream`

}  // namespace spl::kernels::cuda
