#include "services/engine/execution/observers/value_deviation.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::engine {

absl::Status ValueDeviation::BeforeKv(const LayerView& view) {
  if (view.layer != layer_) return absl::OkStatus();
  const ModelConfig& c = view.model.config();
  const kernels::RopeSequence& all = view.rows;
  const PositionRange own{all.positions.front(), all.positions.back() + 1}, before{0, own.begin};
  float* to = scores_ + CountOf(IntersectionOf(candidates_, {&before, 1}));
  for (const PositionRange& range : IntersectionOf(candidates_, {&own, 1})) {
    const auto first = std::lower_bound(all.positions.begin(), all.positions.end(), range.begin);
    const int32_t begin = static_cast<int32_t>(first - all.positions.begin());
    kernels::RopeSequence rows = all;
    rows.row_begin = all.row_begin + begin;
    rows.row_end = rows.row_begin + range.size();
    rows.positions = all.positions.subspan(begin, range.size());
    SPLICE_RETURN_IF_ERROR(view.backend().ValueDeviation(view.context(), {.qkv = view.qkv,
                                                                          .num_qo_heads = c.num_qo_heads,
                                                                          .num_kv_heads = c.num_kv_heads,
                                                                          .head_dim = c.head_dim,
                                                                          .pool = view.pool,
                                                                          .rows = rows,
                                                                          .sequence = view.sequence,
                                                                          .layer = view.layer,
                                                                          .scores = to}));
    to += range.size();
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
