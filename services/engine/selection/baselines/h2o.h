// Selector `h2o`, a baseline (H2O 4, algorithm 1; docs/methods/baselines.md). Each head keeps its heavy hitters, the
// positions that all later rows together attended to most, and the last positions: half of the budget each. It begins
// with those of the prompt. Each step adds its own attention to what they received so far; then its position joins, and
// the one with the least attention of those that are not among the last leaves for good
// (kernels/selection/h2o/heavy_hitters.h). Steps attend to at most the budget and their own position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class H2oSelector final : public PromptSelector {
 public:
  // REQUIRES: a budget of at least 2. The window is half of the budget; options.window is ignored.
  H2oSelector(const ModelConfig& config, const DecodeOptions& options);
  std::string_view name() const override { return "h2o"; }
  int64_t first_row(int64_t /*num_prompt*/) const override { return 0; }
  // Answers may outgrow the budget, and attention is counted from the first row on.
  bool chooses_of(int64_t /*num_prompt*/) const override { return true; }
  bool accumulates() const override { return true; }
  // Keeps the last `window` columns, and the budget - window largest of the others, ties to the lower position.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
  void BeginStep(int64_t kv_len) override;
  ScoringPlan scoring() const override { return plan(); }
  bool Chooses(int32_t layer, int32_t kv_head) const override { return ChoosingSelector::Chooses(layer, kv_head); }
  bool Lists(int32_t /*layer*/, int32_t /*kv_head*/) const override { return false; }
  int64_t most_listed(int64_t /*num_tokens*/) const override { return 0; }
};

}  // namespace spl::engine
