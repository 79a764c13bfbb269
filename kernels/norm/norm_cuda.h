// RMSNorm on a device; the contract is norm.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`. delta and out are f32 or bf16; width is a multiple of 4, at most 32768.
// cudaErrorNotSupported otherwise.
cudaError_t RmsNorm(const RmsNormArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
