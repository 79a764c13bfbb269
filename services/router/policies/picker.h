// Chooses one of the scored pairs.
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

// Temperature 0: the cheapest; among equals (within 1 µs) a random one, so that idle workers share the load. Above 0:
// pair i with probability ∝ exp(-(cost_i - cost_min) / (temperature · scale)). scale is the mean cost above the
// minimum; this spreads herds of equal requests and is independent of units.
class SoftmaxPicker final : public Picker {
 public:
  explicit SoftmaxPicker(double temperature) : temperature_(temperature) {}
  size_t Pick(std::span<const Candidate> candidates, std::mt19937_64& random) const override;

 private:
  const double temperature_;
};

}  // namespace spl::router
