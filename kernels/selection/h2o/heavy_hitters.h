// Keeps the heavy hitters of a head stream while it decodes: H2O's greedy eviction by accumulated attention (H2O 4,
// algorithm 1; docs/methods/baselines.md).
//
// For each sequence of a decode batch whose step selects in this layer, and each KV head of it, with q_h its query
// heads. A stream keeps at most `budget` positions, ascending, each with the attention a_j that it has received so far.
//   join    position kv_len - 1 joins with a = 0. The list of the stream is these positions, at most budget + 1.
//   score   a_j += Σ_h exp(sm_scale <q_h, K_j>) / Σ_j' exp(sm_scale <q_h, K_j'>) over the list, f32.
//   evict   if there are more than `budget`: of all but the last `recent`, the position with the smallest a_j leaves
//           for good, of equal ones the last. A NaN counts as 0.
// Positions that are kept before the first step, and their attention, are the caller's (HeavyHitterPages).
//
// Layout    HeavyHitterPages, in compact pages of the stream; their number does not depend on its length. Lists of
//           candidates (candidates.h) have no meaning here: `listed` and list_tables are ignored.
// Garbage   slots that are not in the list, and pages that no table lists, may hold NaN: they never reach a result.
// Batch     as in select_tokens.h.
// Cost      reads the keys of the list once (twice on a device). Allocates nothing on a device.
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

// Contents of a stream's compact pages, words of 32 bits: word 0 is the number of kept positions; words 2 + 2i and
// 3 + 2i are position i and the bits of its attention, f32. Pages have an even number of words, so that no pair lies in
// two of them.
struct HeavyHitterPages {
  static constexpr int64_t kPosition = 2, kAttention = 3;  // words of the first pair

  int32_t budget = 0;
  size_t page_bytes = 0;  // bytes per page of the pool

  int64_t words_per_page() const { return static_cast<int64_t>(page_bytes / sizeof(int32_t)); }
  int64_t num_pages() const { return (2 + 2 * int64_t{budget} + words_per_page() - 1) / words_per_page(); }
};

struct HeavyHittersArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  // As in SelectTokensArgs, except: only `selects` of the step, budget and recent are read. `recent` is in [1, budget].
  std::span<const SelectingSequence> sequences;
  // Scratch, device [num_sequences * num_kv_heads, attention_stride]; afterwards a_j of the list, before the eviction.
  float* attention = nullptr;
  int64_t attention_stride = 0;  // elements; at least budget + 1
  TokenLists lists;              // out; stride at least budget + 1; lists of streams that do not select stay unchanged
  int32_t layer = 0;             // layer number in the staged batch
  int32_t plan = 0;              // as in SelectTokensArgs
};

// InvalidArgument: shapes, dtypes, a budget or recent out of range, a table that is short or names a page outside the
// pool. Host variants also: kept positions that are not ascending, not before kv_len - 1, not resident, or more than
// budget. Unimplemented (CUDA): more than 32 query heads a KV head.
absl::Status ValidateHeavyHitters(const HeavyHittersArgs& args);

namespace ref {  // attention in double
absl::Status HeavyHitters(const KernelContext& ctx, const HeavyHittersArgs& args);
}
namespace cpu {
absl::Status HeavyHitters(const KernelContext& ctx, const HeavyHittersArgs& args);
}

}  // namespace spl::kernels
