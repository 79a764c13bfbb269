#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/sparsex/column_scores.h"

namespace spl::kernels::ref {
namespace {

double Dot(const KvPoolView& pool, int32_t page, int32_t slot, const float* q) {
  double sum = 0;
  for (int32_t c = 0; c < pool.head_dim; ++c) sum += double{KvElement(pool, pool.k(page), slot, c)} * q[c];
  return sum;
}

bool Sees(const HeadVisibility& v, int32_t row, int32_t column) {
  if (column > row) return false;
  return v.rule != VisibilityRule::kBand || column < v.num_sinks || column > int64_t{row} - v.window;
}

double Column(const ColumnScoresArgs& a, std::span<const int32_t> kv_heads, int32_t position) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  double sum = 0;
  for (const int32_t kv_head : kv_heads) {
    const int32_t page = a.rows.heads[kv_head].page_table[position / kPageTokens];
    for (const int32_t probe : a.probes) {
      if (!Sees(a.rows.heads[kv_head].visibility, a.rows.positions[probe], position)) continue;
      const int64_t row = a.rows.row_begin + probe;
      for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const float* q = a.q + row * a.q_row_stride + static_cast<int64_t>(h) * a.shape.head_dim;
        sum += std::exp(a.shape.sm_scale * Dot(a.pool, page, position % kPageTokens, q) -
                        a.lse[row * a.shape.num_qo_heads + h]);
      }
    }
  }
  return sum;
}

}  // namespace

absl::Status ColumnScores(const KernelContext&, const ColumnScoresArgs& a) {
  if (absl::Status s = ValidateColumnScores(a); !s.ok()) return s;
  std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end());
  if (heads.empty()) {
    heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
  }
  float* out = a.scores;
  for (const PositionRange& range : a.columns) {
    for (int32_t j = range.begin; j < range.end; ++j, ++out) *out = static_cast<float>(*out + Column(a, heads, j));
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
