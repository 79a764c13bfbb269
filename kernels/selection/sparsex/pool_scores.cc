#include "kernels/selection/sparsex/pool_scores.h"

#include <algorithm>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/selection/top_k.h"

namespace spl::kernels {

absl::Status ValidatePoolScores(const PoolScoresArgs& a) {
  if (a.num_scores < 0 || a.num_scores > kTopKScoresMax || a.radius < 0 || a.radius > kPoolRadiusMax)
    return InvalidCall("PoolScores: ", a.num_scores, " scores, radius ", a.radius);
  if (a.num_scores > 0 && (a.scores == nullptr || a.out == nullptr || a.out == a.scores))
    return InvalidCall("PoolScores: null tensor, or out is the input");
  return absl::OkStatus();
}

absl::Status ref::PoolScores(const KernelContext&, const PoolScoresArgs& a) {
  if (absl::Status s = ValidatePoolScores(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_scores; ++i) {
    const int64_t begin = std::max<int64_t>(0, i - a.radius), end = std::min(a.num_scores, i + a.radius + 1);
    a.out[i] = *std::max_element(a.scores + begin, a.scores + end);
  }
  return absl::OkStatus();
}

// Whole shifts of the row, which the compiler turns into vector maxima.
absl::Status cpu::PoolScores(const KernelContext& ctx, const PoolScoresArgs& a) {
  if (absl::Status s = ValidatePoolScores(a); !s.ok()) return s;
  ParallelRows(ctx, a.num_scores, 4096, [&](int64_t begin, int64_t end) {
    std::copy(a.scores + begin, a.scores + end, a.out + begin);
    for (int64_t shift = -a.radius; shift <= a.radius; ++shift) {
      const int64_t first = std::max(begin, -shift), last = std::min(end, a.num_scores - shift);
      for (int64_t i = first; i < last; ++i) a.out[i] = std::max(a.out[i], a.scores[i + shift]);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
