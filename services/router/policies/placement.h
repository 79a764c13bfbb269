// The default placement profile: which filters, which terms, which picker.
#pragma once

#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/policies/policy.h"
#include "services/router/policies/scorers.h"

namespace spl::router {

struct PlacementOptions {
  ScorerOptions scorer;
  double temperature = 0;  // see SoftmaxPicker
  uint64_t seed = 0;       // of tie breaks; 0: from the system
};

// Thread-safe. Cost: pairs × terms, all in memory.
class Placement {
 public:
  explicit Placement(const PlacementOptions& options);

  // The pair to use; it points into query.fleet. Unavailable: no connected pair, or none that fits. ResourceExhausted:
  // every pair left out for lack of room.
  absl::StatusOr<Candidate> Place(const PlacementQuery& query) const;

 private:
  std::vector<std::unique_ptr<Filter>> filters_;
  std::vector<std::unique_ptr<Scorer>> scorers_;
  std::unique_ptr<Picker> picker_;
  mutable std::mutex mutex_;  // guards random_
  mutable std::mt19937_64 random_;
};

}  // namespace spl::router
