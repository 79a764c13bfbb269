// FuseRows on a device; the contract is fuse_rows.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/kv_copy/fuse_rows.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`; reads `batch` instead of args.rows but for the row numbers. row_ids: device memory. A row
// on a page that is not there is left out.
cudaError_t FuseRows(const FuseRowsArgs& args, const RopeBatch& batch, const int32_t* row_ids, cudaStream_t stream);

}  // namespace spl::kernels::cuda
