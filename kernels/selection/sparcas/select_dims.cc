#include "kernels/selection/sparcas/select_dims.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/selection/token_choice.h"

namespace spl::kernels {

std::vector<int32_t> SelectDims(const float* q, int32_t group, int32_t head_dim, int32_t num_dims,
                                const int32_t* before, int32_t* after) {
  std::vector<float> size(static_cast<size_t>(head_dim), 0.0f);
  for (int32_t h = 0; h < group; ++h) {
    for (int32_t c = 0; c < head_dim; ++c) size[c] += std::abs(q[int64_t{h} * head_dim + c]);
  }
  std::vector<int32_t> order(static_cast<size_t>(head_dim));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return OrderedBits(size[x]) > OrderedBits(size[y]); });
  std::vector<char> chosen(static_cast<size_t>(head_dim), 0);
  for (int32_t i = 0; i < num_dims; ++i) chosen[order[i]] = 1;

  std::vector<int32_t> changed;
  for (int32_t slot = 0; slot < num_dims; ++slot) {
    if (before != nullptr && chosen[before[slot]]) {
      after[slot] = before[slot];
      chosen[before[slot]] = 0;
    } else {
      changed.push_back(slot);
    }
  }
  int32_t c = 0;
  for (const int32_t slot : changed) {
    while (!chosen[c]) ++c;
    after[slot] = c++;
  }
  return changed;
}

}  // namespace spl::kernels
