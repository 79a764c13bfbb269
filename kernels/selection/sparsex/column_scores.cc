#include "kernels/selection/sparsex/column_scores.h"

#include <algorithm>

#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

// Whether each column is in a list that ascends.
bool InList(std::span<const PositionRange> columns, std::span<const int32_t> list) {
  auto at = list.begin();
  for (const PositionRange& range : columns) {
    at = std::lower_bound(at, list.end(), range.begin);
    for (int32_t j = range.begin; j < range.end; ++j, ++at) {
      if (at == list.end() || *at != j) return false;
    }
  }
  return true;
}

absl::Status ValidateColumns(const ColumnScoresArgs& a) {
  int32_t end = 0;
  for (const PositionRange& range : a.columns) {
    if (range.begin < end || range.end <= range.begin)
      return InvalidCall("ColumnScores: columns [", range.begin, ", ", range.end, ") after position ", end);
    end = range.end;
  }
  for (const HeadStreamView& head : a.rows.heads) {
    const HeadVisibility& v = head.visibility;
    if (v.rule != VisibilityRule::kFull && v.rule != VisibilityRule::kBand && v.rule != VisibilityRule::kList)
      return InvalidCall("ColumnScores: rows see everything, a band or a list, not blocks or lines");
    if (v.rule == VisibilityRule::kList && !InList(a.columns, v.indices))
      return InvalidCall("ColumnScores: rows see a list, and a column is not in it");
    if (end > head.kv_len) return InvalidCall("ColumnScores: columns up to ", end, ", kv_len is ", head.kv_len);
    if (head.page_table.size() * kPageTokens < static_cast<size_t>(end))
      return InvalidCall("ColumnScores: a page table of ", head.page_table.size(), " pages for columns up to ", end);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateColumnScores(const ColumnScoresArgs& a) {
  const AttentionShape& s = a.shape;
  if (s.num_kv_heads <= 0 || s.num_qo_heads <= 0 || s.num_qo_heads % s.num_kv_heads != 0 || s.head_dim % 8 != 0 ||
      s.head_dim <= 0 || s.head_dim > 256 || a.pool.head_dim != s.head_dim)
    return InvalidCall("ColumnScores: ", s.num_qo_heads, " query heads over ", s.num_kv_heads, " KV heads of ",
                       s.head_dim, ", pool of ", a.pool.head_dim);
  if (!IsKvType(a.pool.dtype)) return InvalidCall("ColumnScores: pages are f32, bf16 or fp8");
  if (a.rows.heads.size() != static_cast<size_t>(s.num_kv_heads) ||
      a.rows.positions.size() != static_cast<size_t>(a.rows.row_end - a.rows.row_begin))
    return InvalidCall("ColumnScores: ", a.rows.heads.size(), " head streams, ", a.rows.positions.size(), " positions");
  int32_t last = -1;
  for (const int32_t probe : a.probes) {
    if (probe <= last || probe >= a.rows.row_end - a.rows.row_begin)
      return InvalidCall("ColumnScores: probe ", probe, " after ", last, " of ", a.rows.row_end - a.rows.row_begin);
    last = probe;
  }
  last = -1;
  for (const int32_t head : a.kv_heads) {
    if (head <= last || head >= s.num_kv_heads)
      return InvalidCall("ColumnScores: KV head ", head, " after ", last, " of ", s.num_kv_heads);
    last = head;
  }
  if (!a.probes.empty() && !a.columns.empty() && (a.q.data == nullptr || a.lse == nullptr || a.scores == nullptr))
    return InvalidCall("ColumnScores: null tensor");
  return ValidateColumns(a);
}

}  // namespace spl::kernels
