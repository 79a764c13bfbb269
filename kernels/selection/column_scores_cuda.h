// Column scores on a device; the contract is column_scores.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/column_scores.h"

namespace spl::kernels::cuda {

// The part of a column range inside one page.
struct ColumnPart {
  int32_t page = 0;  // logical
  int32_t first_slot = 0;
  int32_t num_slots = 0;
  int32_t offset = 0;  // of its first score
};

struct ColumnTables {
  const int32_t* probes = nullptr;    // device memory, rows relative to row_begin
  const int32_t* kv_heads = nullptr;  // device memory, num_kv_heads of them
  const ColumnPart* parts = nullptr;  // device memory, ascending
  int32_t num_probes = 0;
  int32_t num_kv_heads = 0;
  int32_t num_parts = 0;
  int32_t num_scores = 0;
  float* partial = nullptr;  // device scratch, [num_kv_heads, num_scores]
  HeadRules rules;           // of all KV heads of the model
};

// Asynchronous on `stream`; positions and page tables come from `batch` (positions: of all rows of the pass). Fast for
// bf16 queries and pages with heads of 64 or 128.
cudaError_t ColumnScores(const ColumnScoresArgs& args, const PagedBatch& batch, const int32_t* positions,
                         const ColumnTables& tables, cudaStream_t stream);

}  // namespace spl::kernels::cuda
