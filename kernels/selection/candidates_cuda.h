// ListCandidates on a device; the contract is candidates.h's. Which candidates a stream has is staged_selection.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/selection/candidates.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

// kv_len: device [num_sequences]; each, also of later graph replays, is <= max_kv_len. Asynchronous on `stream`. A list
// that is longer than args.lists.stride is cut off there.
cudaError_t ListCandidates(const ListCandidatesArgs& args, const SelectionBatch& selection, const int32_t* kv_len,
                           int32_t num_sequences, int32_t max_kv_len, cudaStream_t stream);

}  // namespace spl::kernels::cuda
