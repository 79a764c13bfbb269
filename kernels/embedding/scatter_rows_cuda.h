// Row scatter on a device; the contract is scatter_rows.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/embedding/scatter_rows.h"

namespace spl::kernels::cuda {

// `device_ids` are args.ids in device memory. Asynchronous on `stream`.
cudaError_t ScatterRows(const ScatterRowsArgs& args, const int32_t* device_ids, cudaStream_t stream);

}  // namespace spl::kernels::cuda
