// TopTokens on a device; the contract is top_tokens.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/selection/staged_selection.h"
#include "kernels/selection/top_tokens.h"

namespace spl::kernels::cuda {

// kv_len: device [num_sequences]; each, also in later graph replays, is <= max_kv_len. Asynchronous on `stream`. weight
// > 0: no score is negative, and the scores of a stream add up to at most `weight`; the choice is the same, and faster
// if many scores are close to each other.
cudaError_t TopTokens(const TopTokensArgs& args, const SelectionBatch& selection, const int32_t* kv_len,
                      int32_t num_sequences, int32_t max_kv_len, cudaStream_t stream, float weight = 0);

}  // namespace spl::kernels::cuda
