#include "kernels/selection/top_k.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0.
uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace

absl::Status ValidateTopK(const TopKArgs& a) {
  if (a.num_scores < 0 || a.num_scores > kTopKScoresMax || a.k < 0 || a.k > a.num_scores)
    return InvalidCall("TopK: the largest ", a.k, " of ", a.num_scores, " (at most ", kTopKScoresMax, ")");
  if (a.k > 0 && (a.scores == nullptr || a.out == nullptr)) return InvalidCall("TopK: null tensor");
  return absl::OkStatus();
}

// The definition: a stable sort.
absl::Status ref::TopK(const KernelContext&, const TopKArgs& a) {
  if (absl::Status s = ValidateTopK(a); !s.ok()) return s;
  std::vector<int32_t> order(static_cast<size_t>(a.num_scores));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return OrderedBits(a.scores[x]) > OrderedBits(a.scores[y]); });
  std::copy_n(order.begin(), a.k, a.out);
  std::sort(a.out, a.out + a.k);
  return absl::OkStatus();
}

// The k-th largest value by selection, then one pass in order: a few nanoseconds a score.
absl::Status cpu::TopK(const KernelContext&, const TopKArgs& a) {
  if (absl::Status s = ValidateTopK(a); !s.ok()) return s;
  if (a.k == 0) return absl::OkStatus();
  std::vector<uint32_t> bits(static_cast<size_t>(a.num_scores));
  std::transform(a.scores, a.scores + a.num_scores, bits.begin(), OrderedBits);
  std::vector<uint32_t> sorted = bits;
  std::nth_element(sorted.begin(), sorted.begin() + (a.k - 1), sorted.end(), std::greater<>());
  const uint32_t threshold = sorted[static_cast<size_t>(a.k - 1)];
  const int64_t num_above = std::count_if(bits.begin(), bits.end(), [&](uint32_t value) { return value > threshold; });
  int64_t ties_left = a.k - num_above;
  int32_t* out = a.out;
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i] < threshold || (bits[i] == threshold && ties_left-- <= 0)) continue;
    *out++ = static_cast<int32_t>(i);
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
