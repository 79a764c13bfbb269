#include "services/engine/methods/agreement.h"

#include <algorithm>
#include <cmath>

namespace spl::engine {
namespace {

constexpr double kZ = 1.6448536269514722;  // one-sided, 95 %

// Signed: the lower bound with -1, the upper with 1.
double Wilson(double share, double weight, double sign) {
  const double spread = std::sqrt(share * (1 - share) / weight + kZ * kZ / (4 * weight * weight));
  return std::clamp((share + kZ * kZ / (2 * weight) + sign * kZ * spread) / (1 + kZ * kZ / weight), 0.0, 1.0);
}

}  // namespace

double WilsonLow(double share, double weight) { return weight <= 0 ? 0 : Wilson(share, weight, -1); }
double WilsonHigh(double share, double weight) { return weight <= 0 ? 1 : Wilson(share, weight, 1); }

}  // namespace spl::engine
