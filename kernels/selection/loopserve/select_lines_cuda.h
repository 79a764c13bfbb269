// The steps of SelectLines on a CUDA device: launchers over device pointers. The contract is select_lines.h's.
//
// The sampled rows are known on the host and travel by value, so nothing is copied; everything else stays on the
// device. Asynchronous on `stream`; allocates nothing and never waits for the host.
// Errors  cudaErrorNotSupported: this variant does not serve the shape, types, alignment or device.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/loopserve/line_scratch.h"
#include "kernels/selection/loopserve/select_lines.h"

namespace spl::kernels::cuda {

struct LineJob {
  LinePlan plan;
  LineScratch scratch;
  LineOptions options;
  PagedBatch batch;  // one sequence: number `sequence` of the tables
  int32_t sequence = 0;
  DType q_dtype = DType::kBF16;
  const void* q = nullptr;   // queries of the first computed row
  int64_t q_row_stride = 0;  // elements
  int32_t num_heads = 0;     // KV heads to compute
  uint8_t head[kMaxKvHeads] = {};
  int32_t sample[kMaxLineSamples] = {};  // rows, relative to the first computed one
};

// kGeneric  any shape and types, SIMT.
// kMma      sm_80 and later; bf16; head_dim 64 or 128; 1, 2, 4 or 8 query heads per KV head.
// kAuto     the faster of these that serves the arguments.
enum class LineVariant : uint8_t { kAuto, kGeneric, kMma };

cudaError_t LineWeights(const LineJob& job, cudaStream_t stream, LineVariant variant = LineVariant::kAuto);
// Turns the weights in job.plan into lines, tiles, masks and column pages.
cudaError_t LineChoiceAndTiles(const LineJob& job, cudaStream_t stream);

}  // namespace spl::kernels::cuda
