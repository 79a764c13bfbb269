// Attention of decode steps to listed positions of which some are in hot buffers (docs/decisions/0019-host-tier.md).
//
// For each sequence of the batch whose step selects in this layer and that has a hot buffer, and each of its KV heads
// that selects: attention of its query heads over the stream's list. K and V of a position on a host page are those of
// its slot, others are in the page table. The result has the bits that SparseAttention of the same backend gives for
// the same list and the same rows in pages. Results of all other streams stay unchanged.
//
// Order     behind RefillHotRows for the same lists: each listed position on a host page has its slot.
// Batch     a stream's result depends on its own inputs alone, bitwise.
// Cost      reads K and V of the list. Host variants gather them into pages first.
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

struct AttendHotRowsArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;        // [num_sequences, num_qo_heads, head_dim], rotated, row stride q_row_stride
  int64_t q_row_stride = 0;  // elements
  Activations out;           // [num_sequences, num_qo_heads, head_dim], contiguous
  float* lse = nullptr;      // [num_sequences, num_qo_heads]: ln Σ exp of the listed scores, or null
  // As in SparseAttentionArgs: read by host backends, while a device reads the staged batch.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;
  int32_t layer = 0;
  int32_t plan = 0;  // as in SparseAttentionArgs
};

// InvalidArgument: shapes, dtypes, null pointers, a hot buffer of a size out of range or smaller than the budget.
absl::Status ValidateAttendHotRows(const AttendHotRowsArgs& args);

namespace ref {
absl::Status AttendHotRows(const KernelContext& ctx, const AttendHotRowsArgs& args);
}
namespace cpu {
absl::Status AttendHotRows(const KernelContext& ctx, const AttendHotRowsArgs& args);
}

}  // namespace spl::kernels
