#include "services/engine/selection/step_modes.h"

#include <algorithm>

#include "services/base/check.h"

namespace spl::engine {
namespace {

// Candidates that `wanted` holds for, longest first.
template <typename Wanted>
std::vector<size_t> LongestFirst(std::span<const StepCandidate> candidates, const Wanted& wanted) {
  std::vector<size_t> order;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].may_choose && wanted(candidates[i])) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return candidates[a].positions > candidates[b].positions; });
  return order;
}

// How many of those that choose go on: all while that costs no more than a dense step, else the best leading part.
size_t NumStaying(const StepCosts& costs, std::span<const StepCandidate> candidates, std::span<const size_t> order) {
  size_t best = 0;
  double most = 0;
  StepLoad load;
  for (size_t n = 1; n <= order.size(); ++n) {
    load = load + StepLoad{1, candidates[order[n - 1]].positions};
    const StepCosts::Cost cost = costs.At(load);
    if (!cost.measured || cost.saved_s() < 0) continue;
    if (n == order.size()) return n;
    if (cost.saved_s() > most) {
      most = cost.saved_s();
      best = n;
    }
  }
  return best;
}

}  // namespace

void DecideModes(const StepCosts& costs, std::span<const StepCandidate> candidates, const StepModeLimits& limits,
                 std::vector<bool>& choose) {
  SPLICE_CHECK(choose.size() == candidates.size(), "a decision for each candidate");
  std::fill(choose.begin(), choose.end(), false);
  const std::vector<size_t> choosing = LongestFirst(candidates, [](const StepCandidate& c) { return c.chooses; });
  const size_t staying = NumStaying(costs, candidates, choosing);
  StepLoad load;
  for (size_t i = 0; i < staying; ++i) {
    choose[choosing[i]] = true;
    load = load + StepLoad{1, candidates[choosing[i]].positions};
  }
  const StepCosts::Cost before = costs.At(load);
  const std::vector<size_t> resting = LongestFirst(
      candidates, [](const StepCandidate& c) { return !c.chooses && (c.rested < 0 || c.rested >= kRestSteps); });
  // Beginners, longest first: how many save most until they end.
  StepLoad beginners;
  int64_t steps_left = 0;
  double most = 0;
  size_t begin = 0;
  for (size_t n = 1; n <= resting.size(); ++n) {
    const StepCandidate& next = candidates[resting[n - 1]];
    beginners = beginners + StepLoad{1, next.positions};
    if (n > 1 && beginners.positions > limits.gathered_tokens) break;
    steps_left += std::min(next.steps_left, kHorizonSteps);
    const StepCosts::Cost cost = costs.At(load + beginners), of_beginners = costs.At(beginners);
    if (!cost.measured) continue;
    const double more = cost.saved_s() - before.saved_s();
    if (cost.saved_s() <= kLeastSaved * cost.dense_s || more <= 0) continue;
    const double packing = of_beginners.measured ? of_beginners.change_s : cost.change_s;
    const double saved = more * static_cast<double>(steps_left) / static_cast<double>(n) - kPayBack * packing;
    if (saved > most) {
      most = saved;
      begin = n;
    }
  }
  for (size_t i = 0; i < begin; ++i) choose[resting[i]] = true;
}

}  // namespace spl::engine
