// The attention that each cached position gets from a set of rows: SparseX's Sparse-Q score (SparseX 4.3;
// docs/methods/sparsex.md, "Choosing rows"; kernel K2).
//
//   s_j = Σ_h Σ_{i ∈ rows, i sees j} exp(sm_scale · <q_i,h, K_j> - lse_i,h),  h over the query heads of `kv_heads`
//
// lse is the log-sum-exp of the row's attention in that layer, so Σ_j s_j over all positions is rows · heads. A row
// sees what the rule of its head allows: kFull, kBand, or kList; with kList every column must be in the list. Only the
// requested columns are computed.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"

namespace spl::kernels {

struct PositionRange {
  int32_t begin = 0, end = 0;
  int32_t size() const { return end - begin; }
  bool operator==(const PositionRange&) const = default;
};

struct ColumnScoresArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;          // [num_q_rows, num_qo_heads, head_dim], row stride q_row_stride; rotated
  int64_t q_row_stride = 0;    // elements
  const float* lse = nullptr;  // [num_q_rows, num_qo_heads]
  // Rows of one sequence. CUDA takes positions and page tables from the staged batch, where `sequence` is the number.
  PrefillSequence rows;
  int32_t sequence = 0;
  int32_t layer = 0;
  std::span<const int32_t> probes;         // rows that count, relative to rows.row_begin; ascending
  std::span<const PositionRange> columns;  // ascending, disjoint; written positions of every head
  std::span<const int32_t> kv_heads;       // empty: all
  // [Σ columns[i].size()], device memory: the ranges one after the other. Results are added to the contents.
  float* scores = nullptr;
};

// InvalidArgument: shapes, a probe that is no row, columns out of order or past kv_len, a head that does not exist.
absl::Status ValidateColumnScores(const ColumnScoresArgs& args);

// Sums in a fixed order: KV heads outside, rows inside; f32 (double in the reference).
namespace ref {
absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& args);
}
namespace cpu {
absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& args);
}

}  // namespace spl::kernels
