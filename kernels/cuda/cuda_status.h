// CUDA and cuBLASLt results as statuses.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>

#include "absl/status/status.h"

namespace spl::kernels::cuda {

// OK, ResourceExhausted (no memory), Unimplemented (not supported), InvalidArgument, or Internal with CUDA's own
// message after `what`. DataLoss: an error that loses the context (illegal address, hardware fault).
absl::Status ToStatus(cudaError_t error, const std::string& what);
absl::Status ToStatus(cublasStatus_t error, const std::string& what);

}  // namespace spl::kernels::cuda

#define SPLICE_CUDA_RETURN_IF_ERROR(expression, what)                                     \
  do {                                                                                    \
    if (const auto splice_cuda_error = (expression); static_cast<int>(splice_cuda_error)) \
      return ::spl::kernels::cuda::ToStatus(splice_cuda_error, what);                     \
  } while (false)
