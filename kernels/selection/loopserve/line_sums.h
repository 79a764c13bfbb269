// The attention that a few sampled rows give to every vertical line (one key) and every slash line (one distance
// between row and key) of a KV head. LoopServe (3.2) and MInference choose their lines by it
// (docs/methods/loopserve.md, kernel K10).
//
//   A[r, j] = Σ_h exp(sm_scale · <q_r,h, K_j> - lse_r,h)   h over the query heads of the KV head, j <= p_r
//   w_v[j]  = Σ_r A[r, j],  w_s[o] = Σ_r A[r, p_r - o],  and the largest A of each line
//
// lse is the log-sum-exp of row r and head h over all j <= p_r, so that Σ_j A[r, j] is the number of heads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"

namespace spl::kernels {

inline constexpr int32_t kMaxLineSamples = 128;

struct LineWeightsArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;                 // [num_q_rows, num_qo_heads, head_dim], row stride q_row_stride; rotated
  int64_t q_row_stride = 0;           // elements
  PrefillSequence rows;               // one sequence; every position before the last row is resident
  std::span<const int32_t> samples;   // relative to rows.row_begin; ascending; 1..kMaxLineSamples
  std::span<const int32_t> kv_heads;  // empty: all; ascending
  // [num_kv_heads, samples.size(), stride]: A[r, j] for j <= p_r; the rest of a row is undefined. Unlisted heads are
  // not written.
  float* weights = nullptr;
  int64_t stride = 0;  // >= the last sample's position + 1
};

// InvalidArgument: shapes, samples out of order or too many, a short page table, a null tensor.
absl::Status ValidateLineWeights(const LineWeightsArgs& args);

// Cost: computes the scores of the samples twice, about 4 · samples · keys · head_dim FLOPs per query head. The host
// takes the log-sum-exp from PrefillAttention.
namespace ref {
absl::Status LineWeights(const KernelContext& ctx, const LineWeightsArgs& args);
}
namespace cpu {
absl::Status LineWeights(const KernelContext& ctx, const LineWeightsArgs& args);
}

// The weights of one KV head, in host memory.
struct LineSample {
  std::span<const int32_t> positions;  // positions of the sampled rows, ascending
  float* weights = nullptr;            // A[r, j] = weights[r · stride + j], j <= positions[r]
  int64_t stride = 0;

  int32_t num_keys() const { return positions.empty() ? 0 : positions.back() + 1; }
};

struct LineSums {
  std::vector<float> column, column_max;  // [num_keys], w_v
  std::vector<float> offset, offset_max;  // [num_keys], w_s
  double total = 0;                       // Σ A
};

// Sums in ascending order of rows, in double; stores f32.
LineSums SumLines(const LineSample& sample);

}  // namespace spl::kernels
