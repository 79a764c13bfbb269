// Attention of sampled rows with a structure that is known: columns and slashes that hold most of the mass, a tail.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/selection/loopserve/line_select.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::testing {

// A [positions.size(), stride] with rows that sum to 1; NaN where no weight is defined.
struct PlantedSample {
  std::vector<int32_t> positions;
  std::vector<float> weights;
  int64_t stride = 0;

  LineSample view() { return {positions, weights.data(), stride}; }
};

struct Planted {
  int32_t columns = 6, slashes = 4;
  float tail = 0.02f;  // share of the mass, spread by a heavy-tailed draw
};

inline PlantedSample PlantSample(Random& random, const LineRows& rows, std::vector<int32_t> samples,
                                 const Planted& what) {
  const int32_t n = rows.num_keys();
  PlantedSample s;
  s.stride = n + random.Int(0, 9);
  std::vector<float> column(static_cast<size_t>(n)), offset(static_cast<size_t>(n));
  for (int32_t i = 0; i < what.columns; ++i)
    column[static_cast<size_t>(random.Int(0, n - 1))] += std::exp(random.Normal());
  for (int32_t i = 0; i < what.slashes; ++i)
    offset[static_cast<size_t>(random.Int(0, std::max(1, n / 2)) % n)] += std::exp(random.Normal());
  column[0] += 2.0f;
  offset[0] += 1.0f;
  for (const int32_t sample : samples) {
    const int32_t p = rows.first_position + sample;
    s.positions.push_back(p);
    std::vector<float> row(static_cast<size_t>(s.stride), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> tail(static_cast<size_t>(p) + 1);
    double planted = 0, noise = 0;
    for (int32_t j = 0; j <= p; ++j) {
      float& x = row[static_cast<size_t>(j)];
      x = (column[static_cast<size_t>(j)] + offset[static_cast<size_t>(p - j)]) * std::exp(0.5f * random.Normal());
      tail[static_cast<size_t>(j)] = std::exp(1.5f * random.Normal());
      planted += x;
      noise += tail[static_cast<size_t>(j)];
    }
    for (int32_t j = 0; j <= p; ++j) {
      float& x = row[static_cast<size_t>(j)];
      x = static_cast<float>((1 - what.tail) * x / planted + what.tail * tail[static_cast<size_t>(j)] / noise);
    }
    s.weights.insert(s.weights.end(), row.begin(), row.end());
  }
  return s;
}

// Σ A outside all lines, and Σ A.
struct Mass {
  double uncovered = 0, total = 0;
};
inline Mass MassOf(const PlantedSample& s, const std::vector<int32_t>& columns, const std::vector<int32_t>& offsets) {
  Mass m;
  for (size_t r = 0; r < s.positions.size(); ++r) {
    for (int32_t j = 0; j <= s.positions[r]; ++j) {
      const double a = s.weights[r * static_cast<size_t>(s.stride) + static_cast<size_t>(j)];
      m.total += a;
      if (!std::binary_search(columns.begin(), columns.end(), j) &&
          !std::binary_search(offsets.begin(), offsets.end(), s.positions[r] - j))
        m.uncovered += a;
    }
  }
  return m;
}

}  // namespace spl::kernels::testing
