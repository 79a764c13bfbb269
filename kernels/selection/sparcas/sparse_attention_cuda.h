// SparseAttention on a device; sparse_attention.h defines what is computed. sm_90, bf16, head_dim 64 or 128, at most 8
// query heads a KV head.
//
// Everything that changes from step to step (kv_len, steps, tables, budgets, dimensions) is read from device memory, so
// that a recorded launch serves later steps with other values; the shape of the launch follows from the arguments
// alone.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/common/token_selection.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

struct SparseArgs {
  AttentionHeads heads;
  PagedBatch batch;
  SelectionBatch selection;
  int64_t dims_offset = 0;     // offset of the layer in StagedSequence::dims, elements
  int32_t max_kv_len = 0;      // every kv_len, also in later graph replays, is <= this; sizes shared memory
  DType dtype = DType::kBF16;  // type of q and out
  const void* q = nullptr;     // [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  void* out = nullptr;   // [num_sequences, num_qo_heads * head_dim]
  float* lse = nullptr;  // [num_sequences, num_qo_heads] or null
  TokenLists lists;
  float* weights = nullptr;  // [num_sequences * num_kv_heads, weights_stride] or null
  int64_t weights_stride = 0;
  // True: the launch may begin before earlier kernels on the stream end (cuda_launch.h). The caller promises that
  // kernels which may still run do not write the staged memory, the dimensions, or packed keys of earlier steps.
  bool early = false;
  float* kept_mass = nullptr;  // [num_sequences, num_kv_heads] or null
};

// Whether a device of this compute capability serves the shape at contexts of up to max_kv_len. Everything else that
// SparseArgs says is served.
bool ServesSparseAttention(int capability, const AttentionHeads& heads, DType dtype, DType pool, int64_t max_kv_len);

// Asynchronous on `stream`. cluster: blocks a stream, 2, 4 or 8; 0: chosen. All make the same bits.
// cudaErrorNotSupported: see ServesSparseAttention.
cudaError_t SparseAttention(const SparseArgs& args, cudaStream_t stream, int cluster = 0);

}  // namespace spl::kernels::cuda
