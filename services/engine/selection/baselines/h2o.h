// Selector `h2o`, a baseline (H2O 4; docs/methods/baselines.md). Each head keeps its heavy hitters, the positions of
// the prompt that all rows behind them together attend to most, and the last positions: half of the budget each. Like
// the other baselines that choose by the prompt, it evicts no generated tokens: answers are short compared with the
// budget.
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
  // Keeps the budget - window largest of each head, ties to the lower position.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
