// Argmax on a device; the contract is argmax.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sampling/argmax.h"

namespace spl::kernels::cuda {

cudaError_t Argmax(const ArgmaxArgs& args, cudaStream_t stream);  // asynchronous on `stream`

}  // namespace spl::kernels::cuda
