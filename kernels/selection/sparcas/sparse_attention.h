// Attention of decode steps to tokens chosen by packed keys: choice, gather and attention in one operation
// (docs/methods/sparcas.md, "Packed keys").
//
// For each sequence of the batch whose step selects in this layer, and each KV head of it, with q_h its query heads and
// C = kv_len - recent, the positions that may be chosen:
//   refresh  D = the 32 dimensions c with the largest Σ_h |q_h,c| (f32, heads in ascending order; ties to the lower
//            one), slots in ascending order. All tiles that hold a position below C are packed anew.
//   append   packs the tiles that hold a position below C and did not in the call before (kv_len = compact_len then).
//   scores   s_h[j] = sm_scale Σ_i Q_h,i N_j,i for j < C, where S and N are the scales and levels of the tile t of j,
//   and
//            Q_h,i = round(q_h,D[i] S_t,i F) / F to even, with the power of two F of packed_keys.h (QueryFactor): 15
//            bits of a query. The products are integers: every backend has the same.
//            w_j = Σ_h exp(s_h[j]) / Σ_{j' < C} exp(s_h[j']), f32.
//   list     the last `recent` positions and, of the others, those with the largest w_j: `budget` together, ties to the
//            lower one; all positions if kv_len <= budget.
//   out      attention of the q_h over the list, as DecodeAttention of rule kSelected.
//   mass     the list's share of the worst head's attention, as packed keys tell: min_h L_h / (L_h + R_h), with
//            L_h = Σ exp(score) over the list, by the keys themselves, and R_h = Σ exp(s_h[j]) over the j < C outside
//            of the list. R_h is taken from a sample where there are more than 32 tiles: the tiles that PackedSample
//            names stand for all. At most Σ_{j < C} exp(s_h[j]). Costs a device the products of the sample, while it
//            waits for rows. The mass is 1 if kv_len <= budget.
// Results of streams that do not select stay unchanged: DecodeAttention writes them, and skips the others by rule
// kElsewhere. Sequences with a hot buffer (SelectingSequence::hot) get their lists here, and nothing else (no mass):
// RefillHotRows and AttendHotRows follow. Tiles whose keys are in host memory are packed from there.
//
// Against SelectTokens: twice the dimensions in half the bytes, and a weight is a share of what may be chosen, so that
// a head that attends to recent tokens has as much say as the others.
//
// Layout    packed keys: packed_keys.h. Dimension tables: SelectingSequence, of 32 dimensions.
// Garbage   slots at or past kv_len, and pages that no table lists, may hold NaN: they never reach a result. A w_j that
//           is NaN counts as 0.
// Batch     a stream's list, output and mass depend on its own inputs alone, bitwise, not on the other sequences of
//           the call, the number of threads, or where pages lie. Lists of different backends may differ where weights
//           are closer than rounding.
// Cost      a step reads 17 bytes of each key on a device (twice, the second time in part from its cache), K and V of
// the
//           list; a refresh reads K once.
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

struct SparseAttentionArgs {
  AttentionShape shape;  // head_dim at least 32
  KvPoolView pool;
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  Activations out;           // [num_sequences, num_qo_heads, head_dim], contiguous
  float* lse = nullptr;      // [num_sequences, num_qo_heads]: ln Σ exp of the listed scores, or null
  // Read by host backends. A device reads the staged batch (BatchSequence::selection), and checks these if they are
  // given. `recent` is at least 64 (kPackedRecentMin); listed sequences are not served.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;            // out
  float* weights = nullptr;    // out, device [num_sequences * num_kv_heads, weights_stride]: w_j of j < C, or null; not
                               // written where nothing is chosen: kv_len <= budget, or recent = budget
  int64_t weights_stride = 0;  // elements; at least the longest kv_len
  // Out, device [num_sequences, num_kv_heads]: mass, or null. Not written for streams that do not select, of sequences
  // with a hot buffer, and where nothing is weighed: recent = budget < kv_len. Variants agree within 0.03.
  float* kept_mass = nullptr;
  int32_t layer = 0;  // layer number in the staged batch
  int32_t plan = 0;   // a device serves the staged sequences of this plan (SequenceSelection::plan)
};

// InvalidArgument: shapes, dtypes, a budget or recent out of range, a listed sequence, a table that is short or names a
// page outside the pool, a position that is not resident.
absl::Status ValidateSparseAttention(const SparseAttentionArgs& args);

namespace ref {  // plain loops, scores in double: the definition
absl::Status SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& args);
}
namespace cpu {
absl::Status SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& args);
}

}  // namespace spl::kernels
