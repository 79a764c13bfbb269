// SelectTokens on a device; what is computed is select_tokens.h's.
//
// Everything that changes from step to step (kv_len, steps, tables, budgets, state) is read from device memory, so that
// a recorded launch serves later steps with other values; the shape of the launch follows from the arguments alone.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/common/token_selection.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

inline constexpr int kMaxSelectKvLen = 1 << 20;

struct SelectArgs {
  AttentionHeads heads;
  PagedBatch batch;
  SelectionBatch selection;
  int32_t num_dims = 0;        // see CompactKeys
  int64_t dims_offset = 0;     // elements into StagedSequence::dims of the layer
  int32_t max_kv_len = 0;      // every kv_len, also of later graph replays, is <= this; sizes shared memory and scratch
  DType dtype = DType::kBF16;  // of q
  const void* q = nullptr;     // [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  TokenLists lists;
  float* weights = nullptr;  // [num_sequences * num_kv_heads, weights_stride] or null
  int64_t weights_stride = 0;
  float* scratch = nullptr;  // SelectScratchBytes; may be null when that is 0
  // Some sequence is listed (LayerSelection::listed): keys are looked up one by one then, which serves the others, too.
  bool listed = false;
  // The launch may begin before the kernels in front of it on the stream end (cuda_launch.h). The caller promises that
  // kernels which may still run write none of the staged memory, the dimensions, and the positions in front of
  // compact_len of the compact keys.
  bool early = false;
};

// How the work is laid out; by default the best measured. All make the same lists and weights, bit for bit.
struct SelectForm {
  int cluster = 0;  // blocks a stream: 2, 4 or 8; 0: auto
  int threads = 0;  // of a block: 512
  int tiles = 0;    // of 64 positions that a warp has in flight
};

// Of the arguments but for `scratch` itself.
size_t SelectScratchBytes(const SelectArgs& args, SelectForm form = {});

// Asynchronous on `stream`. cudaErrorNotSupported: more than 2^20 positions, or a device before sm_80.
cudaError_t SelectTokens(const SelectArgs& args, cudaStream_t stream, SelectForm form = {});

}  // namespace spl::kernels::cuda
