#include "services/engine/selection/baselines/adakv.h"

#include <algorithm>
#include <cmath>

#include "kernels/selection/token_choice.h"

namespace spl::engine {

std::vector<std::vector<int32_t>> AdaKvSelector::Keep(std::span<const float> attention, int32_t columns) const {
  std::vector<std::vector<int32_t>> kept(num_kv_heads_);
  const auto width = static_cast<size_t>(columns);
  std::vector<uint32_t> bits(attention.size());
  for (size_t h = 0; h < kept.size(); ++h) {
    for (int32_t j = 0; j < columns; ++j) {
      // The mean over the window divides all scores by the same number, and is left out.
      float best = 0;
      for (int32_t i = std::max(j - kPoolRadius, 0); i <= std::min(j + kPoolRadius, columns - 1); ++i)
        best = std::max(best, attention[h * width + static_cast<size_t>(i)]);
      bits[h * width + static_cast<size_t>(j)] = kernels::WeightBits(best);
    }
  }
  const int64_t mean = std::min(budget_ - window_, columns);
  std::vector<int32_t> of_layer(static_cast<size_t>(mean) * kept.size());
  kernels::ChooseLargest(bits, static_cast<int64_t>(of_layer.size()), 0, of_layer.data());
  for (size_t h = 0; h < kept.size(); ++h) {
    const auto begin = std::lower_bound(of_layer.begin(), of_layer.end(), static_cast<int32_t>(h * width));
    const auto end = std::lower_bound(begin, of_layer.end(), static_cast<int32_t>((h + 1) * width));
    const double wanted = (1 - kFloor) * static_cast<double>(end - begin) + kFloor * static_cast<double>(mean);
    kept[h].resize(static_cast<size_t>(std::lround(wanted)));
    kernels::ChooseLargest(std::span(bits).subspan(h * width, width), static_cast<int64_t>(kept[h].size()), 0,
                           kept[h].data());
  }
  return kept;
}

}  // namespace spl::engine
