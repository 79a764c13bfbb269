// Selects the tokens that each head stream of a decode step attends to: SparCas's choice by partial keys
// (docs/methods/sparcas.md, kernels K9a to K9d).
//
// For each sequence of the batch whose step selects in this layer, and each KV head of it, with q_h its query heads:
//   refresh  D = the num_dims dimensions c with the largest Σ_h |q_h,c| (f32, heads in ascending order; ties to the
//            lower one). A dimension that stays keeps its slot; new ones take the free slots, both in ascending order
//            (the first time: slot i has the i-th dimension). Slots that changed are gathered anew from K.
//   append   gathers positions [compact_len, kv_len) with the dimensions that are valid now.
//   scores   s_h[j] = sm_scale Σ_i q_h,D[i] K_j,D[i];  w_j = Σ_h exp(s_h[j]) / Σ_j' exp(s_h[j']), f32.
//   list     the last `recent` positions and, of the others, those with the largest w_j: `budget` together, ties to the
//            lower one; all positions if kv_len <= budget. A smaller budget gives a part of the same list.
// For a listed stream, candidates replace positions and their number replaces kv_len, until the list is written
// (candidates.h).
//
// Layout    compact keys: compact_keys.h. Dimension tables: SelectingSequence.
// Garbage   slots at or past kv_len, and pages that no table lists, may hold NaN: they never reach a result. A w_j that
//           is NaN counts as 0.
// Batch     a stream's list depends on its own inputs alone, bitwise, not on the other sequences of the call, the
//           number of threads, or where pages lie. Lists of different backends may differ where weights are closer
//           than rounding.
// Cost      a step reads num_dims of the head_dim elements of each key; a refresh reads K once. Allocates nothing on a
//           device once the largest batch has been seen.
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

struct SelectTokensArgs {
  AttentionShape shape;
  KvPoolView pool;
  int32_t num_dims = 0;      // see CompactKeys
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  // Read by host backends. A device reads the staged batch (BatchSequence::selection), and checks these if they are
  // given.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;            // out; lists of streams that do not select stay unchanged
  float* weights = nullptr;    // out, device [num_sequences * num_kv_heads, weights_stride]: w_j, or null
  int64_t weights_stride = 0;  // elements; at least the longest kv_len
  int32_t layer = 0;           // layer number in the staged batch
  int32_t plan = 0;            // a device serves the staged sequences of this plan (SequenceSelection::plan)
  // True: an operation of the same step wrote the candidates' lists of some sequence (SequenceSelection::outer). A
  // device then waits for it before it reads them.
  bool after_outer = false;
};

// InvalidArgument: shapes, dtypes, a num_dims that does not fit compact_keys.h, a budget or recent out of range, a
// table that is short or names a page outside the pool, a position that is not resident.
absl::Status ValidateSelectTokens(const SelectTokensArgs& args);
// The same checks, and those of candidate lists, which the host can read.
absl::Status ValidateHostSelectTokens(const SelectTokensArgs& args);

namespace ref {  // plain loops, scores in double: the definition
absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& args);
}
namespace cpu {
absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& args);
}

}  // namespace spl::kernels
