#include "kernels/selection/sparcas/sparse_attention.h"

#include "kernels/common/status.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/packed_keys.h"

namespace spl::kernels {

absl::Status ValidateSparseAttention(const SparseAttentionArgs& a) {
  constexpr char kOp[] = "SparseAttention";
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  if (a.shape.head_dim < kPackedDims)
    return InvalidCall(kOp, ": head_dim ", a.shape.head_dim, " is less than the ", kPackedDims, " dimensions of a key");
  const PackedKeys packed{static_cast<int64_t>(a.pool.page_bytes())};
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.selects) continue;
    if (s.step.listed) return InvalidCall(kOp, ": a sequence that holds listed positions only");
    absl::Status status =
        ValidateSelectingTables(kOp, s, a.pool, a.shape.num_kv_heads, packed.num_pages(s.kv_len, s.recent));
    if (status.ok()) status = ValidateCompactStep(kOp, s);
    if (status.ok()) status = ValidateListBudget(kOp, s, a.lists);
    if (!status.ok()) return status;
    if (s.recent < kPackedRecentMin) return InvalidCall(kOp, ": recent ", s.recent, " is less than ", kPackedRecentMin);
    if (s.dims == nullptr) return InvalidCall(kOp, ": dims is null in a sequence that selects");
    if (a.weights != nullptr && a.weights_stride < s.kv_len)
      return InvalidCall(kOp, ": weights_stride ", a.weights_stride, " is less than kv_len ", s.kv_len);
  }
  if (!a.sequences.empty() && (a.q.data == nullptr || a.out.data == nullptr || a.pool.base == nullptr ||
                               a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": q, out, pool.base, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

}  // namespace spl::kernels
