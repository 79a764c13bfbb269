#include <algorithm>
#include <limits>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/selecting_sequence.h"

namespace spl::kernels::ref {
namespace {

struct Stream {
  const PageBoundScoresArgs& a;
  const SelectingSequence& s;
  int32_t head;
  Candidates own;

  std::byte* page(int32_t granule) const { return a.pool.k(s.compact_tables[head][granule / per_page()]); }
  int32_t per_page() const { return BoundsPerPage(a.pool.dtype); }
  DType dtype() const { return DerivedKeyType(a.pool.dtype); }
  int64_t element(int32_t granule) const { return int64_t{granule % per_page()} * 2 * a.shape.head_dim; }

  void Update(int32_t granule) const {
    const int32_t begin = granule * kBoundTokens, end = std::min(begin + kBoundTokens, own.count());
    const auto keys = [&](int32_t j) { return a.pool.k(s.page_tables[head][own.position(j) / kPageTokens]); };
    for (int32_t c = 0; c < a.shape.head_dim; ++c) {
      const auto element_of = [&](int32_t j) { return KvElement(a.pool, keys(j), own.position(j) % kPageTokens, c); };
      float low = element_of(begin), high = low;
      for (int32_t j = begin + 1; j < end; ++j) {
        if (element_of(j) < low) low = element_of(j);
        if (element_of(j) > high) high = element_of(j);
      }
      StoreElement(page(granule), dtype(), element(granule) + c, low);
      StoreElement(page(granule), dtype(), element(granule) + a.shape.head_dim + c, high);
    }
  }

  double Score(int32_t granule, const float* q, int32_t group) const {
    double best = -std::numeric_limits<double>::infinity();
    for (int32_t h = 0; h < group; ++h) {
      double sum = 0;
      for (int32_t c = 0; c < a.shape.head_dim; ++c) {
        const double x = q[int64_t{h} * a.shape.head_dim + c];
        sum += std::max(x * LoadElement(page(granule), dtype(), element(granule) + c),
                        x * LoadElement(page(granule), dtype(), element(granule) + a.shape.head_dim + c));
      }
      best = std::max(best, sum * a.shape.sm_scale);
    }
    return best;
  }
};

}  // namespace

absl::Status PageBoundScores(const KernelContext&, const PageBoundScoresArgs& a) {
  absl::Status valid = ValidatePageBoundScores(a);
  if (valid.ok())
    valid = ValidateListedStreams("PageBoundScores", a.sequences, a.pool, a.shape.num_kv_heads,
                                  [&](int32_t candidates) { return BoundPages(candidates, a.pool.dtype); });
  if (!valid.ok()) return valid;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const SelectingSequence& s = a.sequences[i];
    if (!s.step.selects) continue;
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (!s.selects(h)) continue;
      const Stream x{a, s, h, {a.pool, s, h}};
      const float* q = a.q + static_cast<int64_t>(i) * a.q_row_stride + int64_t{h} * group * a.shape.head_dim;
      float* scores = a.scores + (static_cast<int64_t>(i) * a.shape.num_kv_heads + h) * a.scores_stride;
      for (int32_t g = 0; g * kBoundTokens < x.own.count(); ++g) {
        if (s.step.first || (g + 1) * kBoundTokens > s.step.compact_len) x.Update(g);
        scores[g] = static_cast<float>(x.Score(g, q, group));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
