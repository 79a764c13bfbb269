#include "services/engine/runtime/adaptive_decoding.h"

#include "services/engine/selection/adaptive.h"

namespace spl::engine {

void AdaptiveDecoding::Decide(DecodeBatch& batch) {
  selectors_.clear();
  candidates_.clear();
  lengths_.clear();
  for (auto& sequence : batch.running()) {
    for (DecodeFork& fork : sequence->forks) {
      AdaptiveSelector* const selector = fork.selector == nullptr ? nullptr : fork.selector->adaptive();
      if (selector == nullptr || fork.finished || fork.EndsInFlight()) continue;
      const int64_t positions = fork.num_positions() + 1;
      selectors_.push_back(selector);
      lengths_.push_back(positions);
      candidates_.push_back({.positions = positions - selector->surplus(),
                             .steps_left = fork.sampler->num_left() - fork.in_flight,
                             .may_choose = selector->may_choose(positions),
                             .chooses = selector->chooses(),
                             .rested = selector->rested(positions)});
    }
  }
  if (selectors_.empty()) return;
  choose_.resize(selectors_.size());
  DecideModes(costs_, candidates_, limits_, choose_);
  for (size_t i = 0; i < selectors_.size(); ++i) selectors_[i]->Decide(choose_[i], lengths_[i]);
}

}  // namespace spl::engine
