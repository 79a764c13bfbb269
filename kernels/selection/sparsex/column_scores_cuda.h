// Column scores on a device; the contract is column_scores.h's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/sparsex/column_scores.h"

namespace spl::kernels::cuda {

// The part of a column range inside one page.
struct ColumnPart {
  int32_t page = 0;  // logical
  int32_t first_slot = 0;
  int32_t num_slots = 0;
  int32_t offset = 0;  // offset of its first score
};

struct ColumnTables {
  const int32_t* probes = nullptr;    // device memory, rows relative to row_begin
  const int32_t* kv_heads = nullptr;  // device memory, num_kv_heads of them
  const ColumnPart* parts = nullptr;  // device memory, ascending
  int32_t num_probes = 0;
  int32_t num_kv_heads = 0;
  int32_t num_parts = 0;
  int32_t num_scores = 0;
  void* scratch = nullptr;  // device memory, 16-byte aligned, ColumnScratchBytes(); used by one launch at a time
  HeadRules rules;          // rules of all KV heads of the model
};

// Bytes for the sums of each KV head and, for kSm90, the queries of the probes: 0.5 KiB per probe and query head of
// head_dim 128.
size_t ColumnScratchBytes(const AttentionShape& shape, int32_t num_probes, int32_t num_kv_heads, int32_t num_scores);

// kGeneric  any shape and types, SIMT.
// kMma      sm_80 and later; bf16 queries and pages, heads of 64 or 128.
// kSm90     compute capability 9.0 only: wgmma and TMA; as kMma, pool 128-byte aligned.
// kAuto     the fastest of these that serves the arguments.
enum class ColumnVariant : uint8_t { kAuto, kGeneric, kMma, kSm90 };

// Asynchronous on `stream`. Positions (of all rows of the pass) and page tables come from `positions` and `batch`.
// cudaErrorNotSupported: the variant does not serve the arguments.
cudaError_t ColumnScores(const ColumnScoresArgs& args, const PagedBatch& batch, const int32_t* positions,
                         const ColumnTables& tables, cudaStream_t stream, ColumnVariant variant = ColumnVariant::kAuto);

// Part of kSm90: writes the sums of each KV head to the start of tables.scratch.
cudaError_t ColumnPartialsSm90(const ColumnScoresArgs& args, const PagedBatch& batch, const int32_t* positions,
                               const ColumnTables& tables, cudaStream_t stream);
size_t ColumnPackBytes(const AttentionShape& shape, int32_t num_probes, int32_t num_kv_heads);

}  // namespace spl::kernels::cuda
