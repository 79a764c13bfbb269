#include "kernels/selection/quest/page_bound_scores.h"

#include "kernels/common/status.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/selecting_sequence.h"

namespace spl::kernels {

absl::Status ValidatePageBoundScores(const PageBoundScoresArgs& a) {
  constexpr char kOp[] = "PageBoundScores";
  if (absl::Status s = ValidateSelectingShape(kOp, a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.selects) continue;
    absl::Status status = ValidateCandidates(kOp, s, a.pool, a.shape.num_kv_heads);
    if (status.ok())
      status = ValidateSelectingTables(kOp, s, a.pool, a.shape.num_kv_heads,
                                       s.step.listed ? 0 : BoundPages(s.kv_len, a.pool.dtype));
    if (status.ok()) status = ValidateCompactStep(kOp, s);
    if (!status.ok()) return status;
    if (a.scores_stride < (int64_t{s.kv_len} + kBoundTokens - 1) / kBoundTokens)
      return InvalidCall(kOp, ": scores_stride ", a.scores_stride, " is too short for kv_len ", s.kv_len);
  }
  if (!a.sequences.empty() && (a.q.data == nullptr || a.pool.base == nullptr || a.scores == nullptr))
    return InvalidCall(kOp, ": q, pool.base or scores is null");
  return absl::OkStatus();
}

}  // namespace spl::kernels
