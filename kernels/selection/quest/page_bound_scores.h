// Quest's upper bounds of the scores of 16 positions at a time (docs/methods/baselines.md), the baseline of SparCas.
//
// A *granule* is 16 consecutive positions. For each stream of a sequence whose step selects in this layer:
//   update   min_c and max_c over the keys of every granule that holds a position of [compact_len, kv_len); with
//   `first`,
//            of all granules. The last granule covers the positions that have been written.
//   scores   score = max over the query heads h of the group of sm_scale Σ_c max(q_h,c min_c, q_h,c max_c), f32.
// The maximum over the group is that of Quest's ports to grouped queries: a granule that one head needs is read for
// all of them, and a sum would let the head with the longest query decide for the others. For a listed stream,
// positions are its candidates (candidates.h).
//
// Layout    with n = BoundsPerPage, granule i of a stream is at element (i mod n) 2 head_dim of compact page i / n:
//           [min | max][head_dim], in the pool's type (they are elements of K, so nothing is rounded). n is 64: 1,024
//           positions a page whatever head_dim, an eighth of the bytes of K. In a pool of kE4M3 bounds are bf16
//           (DerivedKeyType) and n is 32.
// Garbage   as in select_tokens.h.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

constexpr int32_t BoundsPerPage(DType pool) { return pool == DType::kE4M3 ? kPageTokens / 2 : kPageTokens; }
constexpr int32_t BoundPageTokens(DType pool) { return kBoundTokens * BoundsPerPage(pool); }
constexpr int64_t BoundPages(int64_t tokens, DType pool) {
  return (tokens + BoundPageTokens(pool) - 1) / BoundPageTokens(pool);
}

struct PageBoundScoresArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  // As in SelectTokensArgs; budget, recent, dims, refresh and parity are ignored.
  std::span<const SelectingSequence> sequences;
  float* scores = nullptr;    // out, device [num_sequences * num_kv_heads, scores_stride]
  int64_t scores_stride = 0;  // elements; at least ceil(kv_len / 16)
  int32_t layer = 0;          // layer number in the staged batch
  int32_t plan = 0;           // as in SelectTokensArgs
};

// InvalidArgument: shapes, dtypes, a stride or table that is short, a page outside the pool or not resident.
absl::Status ValidatePageBoundScores(const PageBoundScoresArgs& args);

namespace ref {  // scores in double
absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& args);
}
namespace cpu {
absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& args);
}

}  // namespace spl::kernels
