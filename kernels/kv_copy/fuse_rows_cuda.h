// FuseRows on a device; the contract is fuse_rows.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/kv_copy/fuse_rows.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`. Reads `batch` instead of args.rows, except for the row numbers. row_ids: device memory.
// Skips a row whose page is not resident.
cudaError_t FuseRows(const FuseRowsArgs& args, const RopeBatch& batch, const int32_t* row_ids, cudaStream_t stream);

}  // namespace spl::kernels::cuda
