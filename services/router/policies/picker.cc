#include "services/router/policies/picker.h"

#include <algorithm>
#include <cmath>

namespace spl::router {

size_t SoftmaxPicker::Pick(std::span<const Candidate> candidates, std::mt19937_64& random) const {
  constexpr double kTieSeconds = 1e-6;
  double lowest = candidates[0].cost_s;
  double total = 0;
  for (const Candidate& c : candidates) {
    lowest = std::min(lowest, c.cost_s);
    total += c.cost_s;
  }
  const double scale = std::max(total / static_cast<double>(candidates.size()) - lowest, kTieSeconds);
  std::vector<double> weights;
  weights.reserve(candidates.size());
  for (const Candidate& c : candidates) {
    const double excess = c.cost_s - lowest;
    weights.push_back(temperature_ > 0        ? std::exp(-excess / (temperature_ * scale))
                      : excess <= kTieSeconds ? 1.0
                                              : 0.0);
  }
  std::discrete_distribution<size_t> distribution(weights.begin(), weights.end());
  return distribution(random);
}

}  // namespace spl::router
