// The gated activation on a device; the contract is activation.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/activation/activation.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`. gate_up and out are f32 or bf16 (not bf16 to f32); width is a multiple of 4.
// cudaErrorNotSupported otherwise.
cudaError_t SiluMul(const SiluMulArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
