#include "services/engine/selection/baselines/snapkv.h"

#include <algorithm>

#include "kernels/selection/token_choice.h"

namespace spl::engine {

std::vector<std::vector<int32_t>> SnapKvSelector::Keep(std::span<const float> attention, int32_t columns) const {
  std::vector<std::vector<int32_t>> kept(num_kv_heads_);
  std::vector<uint32_t> bits(columns);
  const int32_t count = std::min(budget_ - window_, columns);
  for (size_t h = 0; h < kept.size(); ++h) {
    const auto of_head = attention.subspan(h * bits.size(), bits.size());
    for (int32_t j = 0; j < columns; ++j) {
      // Positions beyond the ends count as zeros. Every mean is over the same number, so the sums have the same order.
      float sum = 0;
      for (int32_t i = std::max(j - kPoolRadius, 0); i <= std::min(j + kPoolRadius, columns - 1); ++i)
        sum += of_head[i];
      bits[j] = kernels::WeightBits(sum);
    }
    kept[h].resize(count);
    kernels::ChooseLargest(bits, count, 0, kept[h].data());
  }
  return kept;
}

}  // namespace spl::engine
