// Brings the rows that a step has listed into hot buffers: the copies on the device of K and V in host memory
// (docs/decisions/0019-host-tier.md).
//
// For each sequence of the batch whose step selects in this layer and that has a hot buffer, and each of its KV heads
// that selects, with L the positions of the stream's list that are on host pages:
//   hits     positions of L that have a slot; listed_at of their slots becomes kv_len.
//   misses   the m others, ascending. A slot that is no hit has the age min(kv_len - listed_at, 255). The m oldest of
//            these slots (ties: lower slots first) are given away, in the order of their numbers: the i-th of them to
//            the i-th miss. The position that had the slot loses it; listed_at becomes kv_len, and K and V of the
//            position, scales included, are copied from the host page to the row of the slot.
//   counts   counts[0] grows by the size of L, counts[1] by m, over all streams.
// Everything else stays unchanged. A slot that was never taken is of the greatest age.
//
// Order     behind the operation that wrote the lists. Tables and rows of a stream do not depend on the other sequences
//           of the call, or on the number of threads.
// Memory    host pages are read where they are: on a device they are page-locked (Backend::PinHost).
// Cost      reads 2 rows of each miss over the link, many of them under way at once; and the stream's tables.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

struct RefillHotRowsArgs {
  KvPoolView pool;
  int32_t num_kv_heads = 0;
  // As in SparseAttentionArgs: read by host backends, while a device reads the staged batch.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;
  int32_t layer = 0;
  int32_t plan = 0;  // as in SparseAttentionArgs
};

// InvalidArgument: null pointers, a hot buffer of a size out of range or smaller than the budget.
absl::Status ValidateRefillHotRows(const RefillHotRowsArgs& args);

namespace ref {  // plain loops: the definition
absl::Status RefillHotRows(const KernelContext& ctx, const RefillHotRowsArgs& args);
}
namespace cpu {  // a task for each stream; slots by a count of their ages
absl::Status RefillHotRows(const KernelContext& ctx, const RefillHotRowsArgs& args);
}

}  // namespace spl::kernels
