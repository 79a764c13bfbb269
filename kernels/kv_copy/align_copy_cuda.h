// Align copy on a device; the contract is align_copy.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/kv_copy/align_copy.h"

namespace spl::kernels::cuda {

// The spans of AlignCopyArgs, in device memory.
struct AlignCopyTables {
  const AlignRun* runs = nullptr;
  const int32_t* src_pages = nullptr;
  const int32_t* dst_pages = nullptr;
  const float* cos = nullptr;
  const float* sin = nullptr;
};

// Asynchronous on `stream`.
cudaError_t AlignCopy(const AlignCopyArgs& args, const AlignCopyTables& tables, cudaStream_t stream);

}  // namespace spl::kernels::cuda
