// ListCandidates on a device; the contract is candidates.h's. staged_selection.h defines the candidates of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/selection/candidates.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

// kv_len: device [num_sequences]; each, also in later graph replays, is <= max_kv_len. Asynchronous on `stream`. Cuts a
// list off at args.lists.stride.
cudaError_t ListCandidates(const ListCandidatesArgs& args, const SelectionBatch& selection, const int32_t* kv_len,
                           int32_t num_sequences, int32_t max_kv_len, cudaStream_t stream);

}  // namespace spl::kernels::cuda
