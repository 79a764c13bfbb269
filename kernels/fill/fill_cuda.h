// Reproducible random numbers on a device (the contract is fill.h's), and the widening of 16-bit weights.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/fill/fill.h"

namespace spl::kernels::cuda {

cudaError_t FillRandom(const FillRandomArgs& args, cudaStream_t stream);  // asynchronous on `stream`

// out[i] = from[i], exactly. from is f16 or bf16.
cudaError_t Widen(const void* from, DType dtype, float* out, int64_t count, cudaStream_t stream);

}  // namespace spl::kernels::cuda
