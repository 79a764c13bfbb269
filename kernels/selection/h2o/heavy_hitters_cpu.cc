// The step's query is treated as a prompt of one row that sees the list: prefill attention gives its log-sum-exp, then
// column scores give each key its weight.
#include <vector>

#include "kernels/selection/h2o/heavy_hitters_host.h"
#include "kernels/selection/sparsex/column_scores.h"

namespace spl::kernels::cpu {

absl::Status HeavyHitters(const KernelContext& ctx, const HeavyHittersArgs& a) {
  std::vector<float> out, lse;
  std::vector<PositionRange> columns;
  return kernels::HeavyHitters(a, [&](const HeavyHitterStream& x) -> absl::Status {
    const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
    const AttentionShape shape{group, 1, a.shape.head_dim, a.shape.sm_scale};
    const int64_t width = int64_t{group} * a.shape.head_dim;
    out.resize(static_cast<size_t>(width));
    lse.resize(static_cast<size_t>(group));
    columns.clear();
    for (const int32_t position : x.list) {
      if (columns.empty() || columns.back().end != position) columns.push_back({position, position});
      ++columns.back().end;
    }
    const int32_t own_position = x.kv_len - 1, first_row = 0;
    const HeadStreamView head{.page_table = x.page_table,
                              .kv_len = x.kv_len,
                              .visibility = {.rule = VisibilityRule::kList, .indices = x.list}};
    const PrefillSequence row{.row_begin = 0, .row_end = 1, .positions = {&own_position, 1}, .heads = {&head, 1}};
    absl::Status status = PrefillAttention(ctx, {.shape = shape,
                                                 .pool = a.pool,
                                                 .q = x.q,
                                                 .q_row_stride = width,
                                                 .out = out.data(),
                                                 .lse = lse.data(),
                                                 .sequences = {&row, 1}});
    if (!status.ok()) return status;
    return ColumnScores(ctx, {.shape = shape,
                              .pool = a.pool,
                              .q = x.q,
                              .q_row_stride = width,
                              .lse = lse.data(),
                              .rows = row,
                              .probes = {&first_row, 1},
                              .columns = columns,
                              .scores = x.attention.data()});
  });
}

}  // namespace spl::kernels::cpu
