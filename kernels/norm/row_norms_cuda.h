// Row lengths on a device; the contract is row_norms.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/row_norms.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`. cudaErrorNotSupported: neither f32 nor bf16.
cudaError_t RowNorms(const RowNormsArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
