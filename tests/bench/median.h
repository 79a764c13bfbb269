// The number that the benchmarks report of repeated measurements.
#pragma once

#include <algorithm>
#include <vector>

namespace spl {

// The upper of the two middle ones; 0 of none.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace spl
