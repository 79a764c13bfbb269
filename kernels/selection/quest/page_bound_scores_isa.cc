#include "kernels/selection/quest/page_bound_scores_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kHeads = 4;

// The largest score of n heads.
template <int n>
SPLICE_INLINE float ScoreHeads(const BoundGranules& g, int64_t granule, int head) {
  const int64_t low = granule * 2 * g.head_dim, high = low + g.head_dim;
  const float* q = g.q + static_cast<int64_t>(head) * g.head_dim;
  F sums[n];
  SPLICE_UNROLL
  for (int h = 0; h < n; ++h) sums[h] = Zero();
  for (int c = 0; c < g.head_dim; c += kLanes) {
    const int lanes = g.head_dim - c < kLanes ? g.head_dim - c : kLanes;
    const F min = LoadAs(g.bounds, g.dtype, low + c, lanes), max = LoadAs(g.bounds, g.dtype, high + c, lanes);
    SPLICE_UNROLL
    for (int h = 0; h < n; ++h) {
      const F x = LoadPartial(q + static_cast<int64_t>(h) * g.head_dim + c, lanes);
      sums[h] = Add(sums[h], Max(Mul(x, min), Mul(x, max)));
    }
  }
  float best = ReduceAdd(sums[0]);
  SPLICE_UNROLL
  for (int h = 1; h < n; ++h) {
    const float score = ReduceAdd(sums[h]);
    best = score > best ? score : best;
  }
  return best;
}

template <int n>
SPLICE_INLINE void AllHeads(const BoundGranules& g, int64_t granule, int head, float* best) {
  for (; head + n <= g.num_heads; head += n) {
    const float score = ScoreHeads<n>(g, granule, head);
    *best = score > *best ? score : *best;
  }
  if constexpr (n > 1) {
    if (head < g.num_heads) AllHeads<n - 1>(g, granule, head, best);
  }
}

void Score(const BoundGranules& g) {
  for (int64_t granule = 0; granule < g.num_granules; ++granule) {
    float best = -__builtin_inff();
    AllHeads<kHeads>(g, granule, 0, &best);
    g.scores[granule] = best;
  }
}

}  // namespace

extern const PageBoundKernels kPageBounds;
const PageBoundKernels kPageBounds = {Score};

}  // namespace spl::kernels::cpu::SPLICE_ISA
