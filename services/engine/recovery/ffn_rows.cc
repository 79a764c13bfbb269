#include "services/engine/recovery/ffn_rows.h"

#include <algorithm>
#include <numeric>

namespace spl::engine {

std::vector<int32_t> RowsByMass(std::span<const float> importance, double mass) {
  std::vector<int32_t> rows(importance.size());
  std::iota(rows.begin(), rows.end(), 0);
  double total = 0;
  for (const float value : importance) total += value;
  if (mass >= 1 || !(total > 0)) return rows;
  const auto before = [&](int32_t a, int32_t b) {
    const float x = importance[a], y = importance[b];
    return x != y ? x > y : a < b;
  };
  // Halves what is undecided: [begin, end) are candidates, everything in front is chosen.
  double missing = mass * total;
  auto begin = rows.begin(), end = rows.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    double front = 0;
    for (auto it = begin; it != middle; ++it) front += importance[*it];
    if (front >= missing) {
      end = middle;
    } else {
      missing -= front;
      begin = middle;
    }
  }
  // One candidate is left: the one that crosses, or, after rounding, the last of all.
  rows.erase(end, rows.end());
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace spl::engine
