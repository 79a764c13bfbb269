// Decides before every step of a decode engine's batch which continuations with the method `adaptive` choose tokens
// (selection/step_modes.h).
#pragma once

#include <utility>
#include <vector>

#include "services/engine/runtime/decode_batch.h"
#include "services/engine/selection/step_costs.h"
#include "services/engine/selection/step_modes.h"

namespace spl::engine {

// Engine thread.
class AdaptiveDecoding {
 public:
  AdaptiveDecoding(StepCosts costs, StepModeLimits limits) : costs_(std::move(costs)), limits_(limits) {}

  // Tells the selectors of all continuations that take part in the next step. The same again if the batch has not
  // changed. Costs nothing in a batch without `adaptive`.
  void Decide(DecodeBatch& batch);
  const StepCosts& costs() const { return costs_; }
  void set_costs(StepCosts costs) { costs_ = std::move(costs); }  // before the first step

 private:
  StepCosts costs_;
  const StepModeLimits limits_;
  // Scratch for the current step; kept to avoid allocations.
  std::vector<AdaptiveSelector*> selectors_;
  std::vector<StepCandidate> candidates_;
  std::vector<int64_t> lengths_;  // positions of each one's next step
  std::vector<bool> choose_;
};

}  // namespace spl::engine
