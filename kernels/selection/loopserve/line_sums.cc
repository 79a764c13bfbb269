#include "kernels/selection/loopserve/line_sums.h"

#include <algorithm>

#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateLineWeights(const LineWeightsArgs& a) {
  const AttentionShape& s = a.shape;
  if (s.num_kv_heads <= 0 || s.num_qo_heads <= 0 || s.num_qo_heads % s.num_kv_heads != 0 || s.head_dim % 8 != 0 ||
      s.head_dim <= 0 || s.head_dim > 256 || a.pool.head_dim != s.head_dim)
    return InvalidCall("LineWeights: shape of ", s.num_qo_heads, " query heads over ", s.num_kv_heads, " KV heads of ",
                       s.head_dim, ", pool of ", a.pool.head_dim);
  if (!IsKvType(a.pool.dtype)) return InvalidCall("LineWeights: pool: pages are f32, bf16 or fp8");
  const int32_t num_rows = a.rows.row_end - a.rows.row_begin;
  if (num_rows <= 0 || a.rows.positions.size() != static_cast<size_t>(num_rows) ||
      a.rows.heads.size() != static_cast<size_t>(s.num_kv_heads))
    return InvalidCall("LineWeights: rows [", a.rows.row_begin, ", ", a.rows.row_end, ") with ",
                       a.rows.positions.size(), " positions and ", a.rows.heads.size(), " head streams");
  if (a.samples.empty() || a.samples.size() > static_cast<size_t>(kMaxLineSamples))
    return InvalidCall("LineWeights: samples: ", a.samples.size(), ", 1 to ", kMaxLineSamples, " are taken");
  int32_t last = -1;
  for (const int32_t sample : a.samples) {
    if (sample <= last || sample >= num_rows)
      return InvalidCall("LineWeights: samples: row ", sample, " after ", last, " of ", num_rows);
    last = sample;
  }
  const int32_t num_keys = a.rows.positions[static_cast<size_t>(last)] + 1;
  if (a.rows.positions.front() < 0 || a.stride < num_keys)
    return InvalidCall("LineWeights: stride ", a.stride, " for a row at position ", num_keys - 1);
  last = -1;
  for (const int32_t head : a.kv_heads) {
    if (head <= last || head >= s.num_kv_heads)
      return InvalidCall("LineWeights: kv_heads: ", head, " after ", last, " of ", s.num_kv_heads);
    last = head;
  }
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    if (!a.kv_heads.empty() && !std::binary_search(a.kv_heads.begin(), a.kv_heads.end(), h)) continue;
    const HeadStreamView& head = a.rows.heads[static_cast<size_t>(h)];
    if (num_keys > head.kv_len || head.page_table.size() * kPageTokens < static_cast<size_t>(num_keys))
      return InvalidCall("LineWeights: head stream ", h, ": kv_len ", head.kv_len, " and ", head.page_table.size(),
                         " pages for a row at position ", num_keys - 1);
    if (head.visibility.rule != VisibilityRule::kFull)
      return InvalidCall("LineWeights: head stream ", h, ": lines are chosen among all positions (kFull)");
  }
  if (a.q.data == nullptr || a.weights == nullptr || a.pool.base == nullptr)
    return InvalidCall("LineWeights: null tensor");
  if (a.q_row_stride < int64_t{s.num_qo_heads} * s.head_dim)
    return InvalidCall("LineWeights: q_row_stride ", a.q_row_stride, " is less than a row");
  return absl::OkStatus();
}

LineSums SumLines(const LineSample& sample) {
  const auto n = static_cast<size_t>(sample.num_keys());
  std::vector<double> column(n), offset(n);
  LineSums sums{std::vector<float>(n), std::vector<float>(n), std::vector<float>(n), std::vector<float>(n), 0};
  for (size_t r = 0; r < sample.positions.size(); ++r) {
    const float* a = sample.weights + static_cast<int64_t>(r) * sample.stride;
    const auto p = static_cast<size_t>(sample.positions[r]);
    for (size_t j = 0; j <= p; ++j) {
      column[j] += a[j];
      sums.column_max[j] = std::max(sums.column_max[j], a[j]);
    }
    for (size_t o = 0; o <= p; ++o) {
      offset[o] += a[p - o];
      sums.offset_max[o] = std::max(sums.offset_max[o], a[p - o]);
    }
  }
  for (size_t i = 0; i < n; ++i) {
    sums.total += column[i];
    sums.column[i] = static_cast<float>(column[i]);
    sums.offset[i] = static_cast<float>(offset[i]);
  }
  return sums;
}

}  // namespace spl::kernels
