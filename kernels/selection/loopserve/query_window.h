// Selects the tokens that the last queries of a sequence attended to most: LoopServe's progressive selection while
// decoding (LoopServe 3.3; docs/methods/loopserve.md, kernel K11).
//
// Runs for each sequence of a decode batch that keeps its queries in this layer (LayerSelection::records), and for
// each of its KV heads. q_b,h is the query of the group's head h at the b-th of the last `window` positions, this
// step's included.
//   record   this step's queries replace the oldest.
//   choose   if `selects` and `refresh`: w_j = Σ_b Σ_h exp(sm_scale <q_b,h, K_j>) / Σ_j' exp(sm_scale <q_b,h, K_j'>),
//            over the positions that q_b,h sees, f32. Keeps the last `recent` positions and, of the others, those with
//            the largest w_j: `budget` together, ties to the lower one; all positions if kv_len <= budget.
//   join     if `selects` alone: also keeps position kv_len - 1. At most `window` - 1 times between two choices.
// The list of a selecting stream is what it keeps. In its pages the list has the layout of candidates (candidates.h).
// For a listed stream, candidates replace positions and their number replaces kv_len, except for a position that joins
// (candidates.h).
//
// Layout    queries and kept positions lie in compact pages of the stream (QueryWindow); their number does not depend
//           on the length.
// Garbage, batch  as in select_tokens.h.
// Cost      a choice reads K twice and computes window · group scores per key; other steps cost next to nothing.
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

inline constexpr int32_t kQueryWindowMax = 128;

// Contents of a stream's compact pages: rows of queries [window, group] of head_dim elements, none across two pages;
// then, from a page of its own, the number of kept positions and the positions, int32.
struct QueryWindow {
  int32_t head_dim = 0;  // query heads per KV head
  int32_t group = 0;     // number of queries to keep, in [1, kQueryWindowMax]
  int32_t window = 0;    // queries that are kept, in [1, kQueryWindowMax]
  int32_t budget = 0;
  DType query_dtype = DType::kF32;  // type of QueryWindowArgs::q
  size_t page_bytes = 0;            // bytes per page of the pool

  int64_t rows_per_page() const { return static_cast<int64_t>(page_bytes / (DTypeBytes(query_dtype) * head_dim)); }
  int64_t query_pages() const { return (int64_t{window} * group + rows_per_page() - 1) / rows_per_page(); }
  int64_t entries_per_page() const { return static_cast<int64_t>(page_bytes / sizeof(int32_t)); }
  int64_t list_tokens() const { return int64_t{budget} + window - 1; }
  int64_t num_pages() const { return query_pages() + list_tokens() / entries_per_page() + 1; }
};

struct QueryWindowArgs {
  AttentionShape shape;
  KvPoolView pool;
  int32_t window = 0;
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  // As in SelectTokensArgs, except: compact_len is the number of queries recorded before; dims and parity are ignored.
  // Budgets may differ; they determine where a stream's list begins.
  std::span<const SelectingSequence> sequences;
  float* scores = nullptr;  // scratch, device [num_sequences * num_kv_heads, scores_stride]; null: no sequence chooses
  int64_t scores_stride = 0;  // elements; at least the longest kv_len
  TokenLists lists;           // out; stride at least budget + window - 1
  int32_t layer = 0;          // layer number in the staged batch
  int32_t plan = 0;           // as in SelectTokensArgs
  // False: no sequence chooses in this step (records and joins only). A device then launches no scoring, so a recorded
  // step of this kind serves only such steps.
  bool chooses = true;
  // True: serves the outer choices of sequences (SequenceSelection::outer): `sequences` are these, and a device reads
  // the staged ones. The kept tokens are then the list of a SelectTokens call that follows.
  bool outer = false;
  // True: some sequence is listed (LayerSelection::listed). A device then looks keys up one by one, which serves the
  // other sequences too. Like `chooses`, part of what a recorded step holds.
  bool listed = false;
};

// InvalidArgument: shapes, dtypes, a window, budget or recent out of range, a table that is short or names a page
// outside the pool, a choice in a call without `chooses`.
absl::Status ValidateQueryWindow(const QueryWindowArgs& args);

namespace ref {  // scores in double
absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& args);
}
namespace cpu {
absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& args);
}

}  // namespace spl::kernels
