// SelectTokens on a device; select_tokens.h defines what is computed.
//
// Everything that changes from step to step (kv_len, steps, tables, budgets, state) is read from device memory, so that
// a recorded launch serves later steps with other values; the shape of the launch follows from the arguments alone.
// Pages are of any type that a pool may have; queries of f32 or bf16 go with each.
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
  int64_t dims_offset = 0;     // offset of the layer in StagedSequence::dims, elements
  int32_t max_kv_len = 0;      // every kv_len, also in later graph replays, is <= this; sizes shared memory and scratch
  DType dtype = DType::kBF16;  // type of q
  const void* q = nullptr;     // [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  TokenLists lists;
  float* weights = nullptr;  // [num_sequences * num_kv_heads, weights_stride] or null
  int64_t weights_stride = 0;
  float* scratch = nullptr;  // SelectScratchBytes; may be null when that is 0
  // True: some sequence is listed (LayerSelection::listed). Keys are then looked up one by one, for all sequences.
  bool listed = false;
  // True: the launch may begin before earlier kernels on the stream end (cuda_launch.h). The caller promises that
  // kernels which may still run do not write the staged memory, the dimensions, lists of candidates, or compact keys of
  // positions before compact_len.
  bool early = false;
};

// Layout of the work; the default is the best measured. All forms make the same lists and weights, bit for bit.
struct SelectForm {
  int cluster = 0;  // blocks per stream: 2, 4 or 8; 0: auto
  int threads = 0;  // threads per block: 512; 0: auto
  int tiles = 0;    // tiles of 64 positions that a warp has in flight; 0: auto
};

// Depends on the arguments, except `scratch`.
size_t SelectScratchBytes(const SelectArgs& args, SelectForm form = {});

// Asynchronous on `stream`. cudaErrorNotSupported: more than 2^20 positions, or a device before sm_80.
cudaError_t SelectTokens(const SelectArgs& args, cudaStream_t stream, SelectForm form = {});

}  // namespace spl::kernels::cuda
