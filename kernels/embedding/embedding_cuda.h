// Row lookups on a device; the contract is embedding.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/embedding/embedding.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`; ids are device_ids[0, num_rows) instead of args.ids, and are not checked here. Width is a
// multiple of 4; out is f32 or bf16. cudaErrorNotSupported otherwise.
cudaError_t GatherRows(const GatherRowsArgs& args, const int32_t* device_ids, int64_t num_rows, cudaStream_t stream);

}  // namespace spl::kernels::cuda
