#include "kernels/selection/sparcas/select_tokens.h"

#include "kernels/common/status.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/compact_keys.h"

namespace spl::kernels {

absl::Status ValidateSelectTokens(const SelectTokensArgs& a) {
  constexpr char kOp[] = "SelectTokens";
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  const CompactKeys compact{a.shape.head_dim, a.num_dims, a.pool.dtype};
  if (!compact.valid())
    return InvalidCall(kOp, ": num_dims ", a.num_dims, " is not a multiple of 4 up to head_dim ", a.shape.head_dim,
                       " that divides twice of it");
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.selects) continue;
    absl::Status status = ValidateCandidates(kOp, s, a.pool, a.shape.num_kv_heads);
    if (status.ok())
      status = ValidateSelectingTables(kOp, s, a.pool, a.shape.num_kv_heads,
                                       s.step.listed ? 0 : compact.num_pages(s.kv_len));
    if (status.ok()) status = ValidateCompactStep(kOp, s);
    if (!status.ok()) return status;
    if (status = ValidateListBudget(kOp, s, a.lists); !status.ok()) return status;
    if (s.dims == nullptr) return InvalidCall(kOp, ": dims is null in a sequence that selects");
    if (a.weights != nullptr && a.weights_stride < s.kv_len)
      return InvalidCall(kOp, ": weights_stride ", a.weights_stride, " is less than kv_len ", s.kv_len);
  }
  if (!a.sequences.empty() &&
      (a.q.data == nullptr || a.pool.base == nullptr || a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": q, pool.base, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

absl::Status ValidateHostSelectTokens(const SelectTokensArgs& a) {
  if (absl::Status s = ValidateSelectTokens(a); !s.ok()) return s;
  const CompactKeys compact{a.shape.head_dim, a.num_dims, a.pool.dtype};
  return ValidateListedStreams("SelectTokens", a.sequences, a.pool, a.shape.num_kv_heads,
                               [&](int32_t candidates) { return compact.num_pages(candidates); });
}

}  // namespace spl::kernels
