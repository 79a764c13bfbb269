#include "services/engine/execution/observers/column_scoring.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::engine {

void ColumnScoring::BeginPass(std::span<const int32_t> positions) {
  probes_.clear();
  for (size_t i = 0; i < positions.size(); ++i) {
    if (ContainsPosition(options_.probes, positions[i])) probes_.push_back(static_cast<int32_t>(i));
  }
  // Positions behind the last row are written later, and no row of this pass sees them.
  const PositionRange seen{0, positions.back() + 1};
  candidates_ = IntersectionOf(options_.candidates, {&seen, 1});
}

absl::Status ColumnScoring::AfterAttention(const LayerView& view) {
  if (!Scores(view.layer)) return absl::OkStatus();
  const int32_t heads = view.model.config().num_kv_heads;
  kernels::ColumnScoresArgs args = ColumnArgs(view);
  args.probes = probes_;
  args.columns = candidates_;
  args.scores = options_.scores;
  if (options_.every_head) {
    const int64_t columns = CountOf(candidates_);
    for (int32_t h = 0; h < heads; ++h) {
      args.kv_heads = {&h, 1};
      args.scores = options_.scores + (int64_t{view.layer} * heads + h) * columns;
      SPLICE_RETURN_IF_ERROR(view.backend().ColumnScores(view.context(), args));
    }
    return absl::OkStatus();
  }
  heads_.clear();
  if (!options_.kv_heads.empty()) {
    const std::vector<int32_t>& of_layer = options_.kv_heads[view.layer - options_.layer];
    for (const int32_t head : of_layer) {
      const int32_t own = head - view.model.first_kv_head();
      if (own >= 0 && own < heads) heads_.push_back(own);
    }
    if (heads_.empty() && !of_layer.empty()) return absl::OkStatus();
  }
  args.kv_heads = heads_;
  return view.backend().ColumnScores(view.context(), args);
}

}  // namespace spl::engine
