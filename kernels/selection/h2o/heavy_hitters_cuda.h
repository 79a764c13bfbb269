// HeavyHitters on a device; heavy_hitters.h defines what is computed. Everything that changes from step to step is read
// from device memory, so that a recorded launch serves later steps with other values.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/h2o/heavy_hitters.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

inline constexpr int kMaxHitterGroup = 32;  // query heads per KV head: a lane each

// Asynchronous on `stream`. cudaErrorNotSupported: more than kMaxHitterGroup query heads a KV head.
cudaError_t HeavyHitters(const HeavyHittersArgs& args, const PagedBatch& batch, const SelectionBatch& selection,
                         cudaStream_t stream);

}  // namespace spl::kernels::cuda
