// Paged attention: the two contracts that serve every prefill and decode method (docs/methods/kernels.md).
//
// Both compute, for query head h of KV head g = h / (num_qo_heads / num_kv_heads), at position p, over the visible and
// resident positions j:   s_j = sm_scale * <q, K_j>,  lse = ln Σ exp(s_j),  out = Σ exp(s_j - lse) V_j.
//
// Pages      logical page i of a (sequence, KV head) holds positions [64 i, 64 i + 63]; page_table[i] is its physical
//            page or kNoPage. A visible position on a kNoPage page is a caller's bug (DCHECK) and is skipped. Slots
//            past kv_len and pages that no table lists are never read: they may hold NaN.
// Determinism  a row's result depends only on its own query, visibility and keys. It is bitwise the same whatever other
//            rows or sequences share the call, however the prompt is cut into slices (chunked prefill), whatever the
//            number of threads, and wherever the pages lie. Decode splits long contexts at fixed lengths for this
//            reason, never by load.
// Numerics   fp32 scores, softmax and accumulation, within Tolerance(dtype) of the reference; a row that sees nothing
//            gives zeros and lse = -infinity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"
#include "kernels/common/visibility.h"

namespace spl::kernels {

// One head stream (the KV of one sequence and KV head), borrowed for the call.
struct HeadStreamView {
  std::span<const int32_t> page_table;  // [ceil(kv_len / 64)] or longer
  int32_t kv_len = 0;                   // positions [0, kv_len) have been written
  HeadVisibility visibility;
};

// Rows [row_begin, row_end) of q belong to one sequence. positions are sorted ascending, each < kv_len of every head:
// K and V of the rows themselves are already in the pages.
struct PrefillSequence {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  std::span<const int32_t> positions;     // [row_end - row_begin]
  std::span<const HeadStreamView> heads;  // [num_kv_heads]
};

struct AttentionShape {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
  int32_t head_dim = 0;      // multiple of 8, at most 256
  float sm_scale = 0;        // usually 1 / sqrt(head_dim)
};

struct PrefillAttentionArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;                          // [num_rows, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;                    // elements
  Activations out;                             // [num_rows, num_qo_heads, head_dim], contiguous
  float* lse = nullptr;                        // [num_rows, num_qo_heads] or null
  std::span<const PrefillSequence> sequences;  // the first ones of the pass, from its first row on
  int32_t layer = 0;                           // layer number in the staged batch; see RopeWriteKvArgs
  // > 0: computes only the last `last_rows` rows of each sequence; the results of its other rows stay unchanged.
  int32_t last_rows = 0;
};

// One query row per sequence, at position kv_len - 1 of each head. The sequences are consecutive ones of the pass: q
// and out begin with the row of the first.
struct DecodeAttentionArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;  // [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  Activations out;                          // [num_sequences, num_qo_heads, head_dim], contiguous
  float* lse = nullptr;                     // [num_sequences, num_qo_heads] or null
  std::span<const HeadStreamView> streams;  // [num_sequences * num_kv_heads]
  int32_t layer = 0;                        // layer number in the staged batch; see RopeWriteKvArgs
  int32_t first_sequence = 0;               // number of the first sequence in the staged batch
  // True: a device reads visibility from the staged batch (BatchArgs), which must say the same as `streams`. A recorded
  // call then serves sequences of any visibility. False: visibility may be part of the recording.
  bool staged_plans = false;
  // Lists chosen on the device (select_tokens.h): stream i of rule kSelected sees entry i. Streams of other rules may
  // share the call; their entries are ignored. An empty list gives zeros.
  TokenLists lists = {};
};

// InvalidArgument: shapes, dtypes, a row position at or past kv_len, unsorted positions or indices, a short page table,
// kSelected or kElsewhere in prefill, kSelected without lists.
absl::Status ValidatePrefillAttention(const PrefillAttentionArgs& args);
absl::Status ValidateDecodeAttention(const DecodeAttentionArgs& args);

namespace ref {  // plain loops, double accumulation: the definition
absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& args);
absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& args);
}  // namespace ref

namespace cpu {  // AVX-512, AVX2+FMA or portable, chosen at run time
absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& args);
absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& args);
}  // namespace cpu

}  // namespace spl::kernels
