// RefillHotRows and AttendHotRows on a device; refill_hot_rows.h and attend_hot_rows.h define what is computed. sm_90,
// bf16, pages of bf16 or e4m3, head_dim 64 or 128, at most 8 query heads a KV head: what SparseAttention serves.
//
// Everything that changes from step to step is read from device memory, so that recorded launches serve later steps.
// Host pages are page-locked memory, read over the link by its address on the host.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/common/token_selection.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

struct HotArgs {
  AttentionHeads heads;
  PagedBatch batch;
  SelectionBatch selection;
  int64_t first_stream = 0;  // the layer: its number times num_kv_heads
  TokenLists lists;
  bool early = false;  // the launch may begin before the kernel in front of it ends; it waits for that first
  // AttendHotRows alone.
  const void* q = nullptr;  // bf16 [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  void* out = nullptr;   // bf16 [num_sequences, num_qo_heads * head_dim]
  float* lse = nullptr;  // [num_sequences, num_qo_heads] or null
};

// Asynchronous on `stream`. cudaErrorNotSupported: a shape that is not served; nothing was launched.
cudaError_t RefillHotRows(const HotArgs& args, cudaStream_t stream);
// cluster: blocks a stream, 4 or 8; 0: chosen. Both make the same bits.
cudaError_t AttendHotRows(const HotArgs& args, cudaStream_t stream, int cluster = 0);

}  // namespace spl::kernels::cuda
