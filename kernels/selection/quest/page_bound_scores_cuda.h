// PageBoundScores on a device; the contract is page_bound_scores.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

// Every kv_len, also in later graph replays, is <= max_kv_len. Asynchronous on `stream`.
cudaError_t PageBoundScores(const PageBoundScoresArgs& args, const PagedBatch& batch, const SelectionBatch& selection,
                            int32_t max_kv_len, cudaStream_t stream);

}  // namespace spl::kernels::cuda
