// The kept queries are treated as a short prompt: prefill attention gives their log-sum-exp, then column scores give
// each key its weight. For a listed stream both run over the list: the recorded queries come after all of it.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/selection/loopserve/query_window_host.h"
#include "kernels/selection/sparsex/column_scores.h"

namespace spl::kernels::cpu {

absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& a) {
  std::vector<float> out, lse;
  std::vector<int32_t> positions, probes, listed;
  std::vector<PositionRange> columns;
  return kernels::ChooseByQueryWindow(a, [&](const QueryWindowStream& x) -> absl::Status {
    const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
    const AttentionShape shape{group, 1, a.shape.head_dim, a.shape.sm_scale};
    const int64_t width = int64_t{group} * a.shape.head_dim;
    out.resize(x.queries.size());
    lse.resize(static_cast<size_t>(x.num_queries) * static_cast<size_t>(group));
    positions.resize(static_cast<size_t>(x.num_queries));
    probes.resize(positions.size());
    std::iota(positions.begin(), positions.end(), x.kv_len - x.num_queries);
    std::iota(probes.begin(), probes.end(), 0);
    HeadStreamView head{.page_table = x.page_table, .kv_len = x.kv_len};
    columns.assign(1, {0, x.kv_len});
    if (x.candidates.listed()) {
      listed.resize(x.scores.size());
      x.candidates.Copy(0, x.candidates.count(), listed.data());
      head.visibility = {.rule = VisibilityRule::kList, .indices = listed};
      columns.clear();
      for (const int32_t position : listed) {
        if (columns.empty() || columns.back().end != position) columns.push_back({position, position});
        ++columns.back().end;
      }
    }
    const PrefillSequence rows{.row_begin = 0, .row_end = x.num_queries, .positions = positions, .heads = {&head, 1}};
    if (absl::Status s = PrefillAttention(ctx, {.shape = shape,
                                                .pool = a.pool,
                                                .q = x.queries.data(),
                                                .q_row_stride = width,
                                                .out = out.data(),
                                                .lse = lse.data(),
                                                .sequences = {&rows, 1}});
        !s.ok())
      return s;
    std::fill(x.scores.begin(), x.scores.end(), 0.0f);
    return ColumnScores(ctx, {.shape = shape,
                              .pool = a.pool,
                              .q = x.queries.data(),
                              .q_row_stride = width,
                              .lse = lse.data(),
                              .rows = rows,
                              .probes = probes,
                              .columns = columns,
                              .scores = x.scores.data()});
  });
}

}  // namespace spl::kernels::cpu
