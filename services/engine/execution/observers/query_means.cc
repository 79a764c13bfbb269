#include "services/engine/execution/observers/query_means.h"

#include <algorithm>
#include <numeric>

#include "services/base/status.h"

namespace spl::engine {

void QueryMeans::BeginPass(std::span<const int32_t> positions) {
  const auto row_of = [&](int32_t position) {
    return static_cast<int32_t>(std::lower_bound(positions.begin(), positions.end(), position) - positions.begin());
  };
  rows_.clear();
  for (const Group& group : groups_) rows_.push_back({row_of(group.rows.begin), row_of(group.rows.end)});
}

absl::Status QueryMeans::AfterKv(const LayerView& view) {
  const ModelConfig& c = view.model.config();
  const auto width = static_cast<size_t>(c.q_size()), stride = static_cast<size_t>(view.q_row_stride);
  const auto whole = static_cast<size_t>(view.whole.q_size());
  const auto first = static_cast<size_t>(view.model.first_kv_head() * (c.num_qo_heads / c.num_kv_heads) * c.head_dim);
  const size_t bytes = kernels::DTypeBytes(view.q.dtype);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto rows = static_cast<size_t>(rows_[g].size());
    if (rows == 0) continue;
    const std::byte* const from = static_cast<const std::byte*>(view.q.data) +
                                  static_cast<size_t>(view.rows.row_begin + rows_[g].begin) * stride * bytes;
    SPLICE_ASSIGN_OR_RETURN(const void* host, view.session.ReadBack(from, ((rows - 1) * stride + width) * bytes));
    double* const sums = groups_[g].sums + static_cast<size_t>(view.layer) * whole + first;
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = 0; i < width; ++i) {
        const size_t at = row * stride + i;
        sums[i] += view.q.dtype == kernels::DType::kF32 ? static_cast<const float*>(host)[at]
                                                        : kernels::ToFloat(static_cast<const kernels::bf16*>(host)[at]);
      }
    }
  }
  return absl::OkStatus();
}

bool QueryMeans::wants_lse(int32_t /*layer*/, const LayerPlan& /*plan*/) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (AsksForAttention(g)) return true;
  }
  return false;
}

absl::Status QueryMeans::AfterAttention(const LayerView& view) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!AsksForAttention(g)) continue;
    std::vector<int32_t> probes(rows_[g].size());
    std::iota(probes.begin(), probes.end(), rows_[g].begin);
    kernels::ColumnScoresArgs args = ColumnArgs(view);
    args.probes = probes;
    args.columns = {&groups_[g].attention_to, 1};
    args.scores = groups_[g].scores;
    SPLICE_RETURN_IF_ERROR(view.backend().ColumnScores(view.context(), args));
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
