// SequenceSelection (token_selection.h) where kernels read it: staged by the session, the same addresses every step.
#pragma once

#include <cstdint>

#include "kernels/common/kv_pool.h"

namespace spl::kernels::cuda {

struct StagedSequence {
  int32_t* dims = nullptr;     // [num_layers, num_kv_heads, 2, num_dims]
  int64_t compact_offset = 0;  // of its tables among compact_tables
  int32_t budget = 0;
  int32_t recent = 0;
};

// LayerSelection. flags: which of these hold; parity is the bit kParity.
struct StagedStep {
  static constexpr int32_t kSelects = 1, kRefresh = 2, kFirst = 4, kParity = 8, kRecords = 16;
  int32_t flags = 0;
  int32_t compact_len = 0;
};

// One layer of a staged batch whose sequences choose tokens.
struct SelectionBatch {
  const StagedSequence* sequences = nullptr;  // device [num_sequences]
  const StagedStep* steps = nullptr;          // device [num_sequences], of the layer
  const int32_t* compact_tables = nullptr;    // device; the caller has added the layer's offset
  int64_t compact_head_stride = 0;            // elements between the tables of two KV heads
  int32_t flags = StagedStep::kSelects;       // that the step of a sequence must have for Selects

#ifdef __CUDACC__
  // Whether the stream chooses in this step: a head without compact pages never does.
  __device__ bool Selects(int32_t sequence, int32_t kv_head) const {
    if ((steps[sequence].flags & flags) != flags) return false;
    return compact_tables == nullptr ||
           compact_tables[sequences[sequence].compact_offset + kv_head * compact_head_stride] != kNoPage;
  }
#endif
};

}  // namespace spl::kernels::cuda
