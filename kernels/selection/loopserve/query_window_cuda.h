// ChooseByQueryWindow on a device; query_window.h defines what is computed.
//
// Everything that changes from step to step (kv_len, steps, tables, budgets) is read from device memory, so that a
// recorded launch serves later steps with other values. The shape of the launch follows from the arguments alone.
//
// A step in which no sequence chooses is one launch, which records queries and joins positions. A step in which some do
// (QueryWindowArgs::chooses) is five: record and join, statistics, scores, choice, keep. The two kinds are recorded
// separately: a choice is due in one of `window` steps, and four launches per layer whose blocks only look and leave
// would still cost the others time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/loopserve/query_window.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

struct QueryWindowLaunch {
  PagedBatch batch;
  SelectionBatch selection;
  int32_t max_kv_len = 0;   // every kv_len, also in later graph replays, is <= this
  int32_t max_streams = 0;  // upper bound for every launch that gets this scratch
  void* scratch = nullptr;  // QueryWindowScratchBytes, 16-byte aligned; zeroed before the first launch
};

// Depends on the arguments and on the launch, except `scratch`. 0: no sequence chooses.
size_t QueryWindowScratchBytes(const QueryWindowArgs& args, const QueryWindowLaunch& launch);

// kGeneric  any shape and types, SIMT.
// kMma      bf16 queries and pages, heads of 64 or 128, at most 512 queries (window times group); sm_80 and later.
// kAuto     the faster of these that serves the arguments.
enum class WindowVariant : uint8_t { kAuto, kGeneric, kMma };

// Asynchronous on `stream`. The scores of a choice stay in args.scores. cudaErrorNotSupported: the variant does not
// serve the arguments, or a device before sm_80.
cudaError_t ChooseByQueryWindow(const QueryWindowArgs& args, const QueryWindowLaunch& launch, cudaStream_t stream,
                                WindowVariant variant = WindowVariant::kAuto);

}  // namespace spl::kernels::cuda
