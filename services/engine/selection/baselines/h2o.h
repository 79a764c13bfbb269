// Selector `h2o`, a baseline: of each head the positions of the prompt that all rows behind them together attend to
// most, its heavy hitters, and the last ones, half of the budget each (H2O 4; docs/methods/baselines.md). As the other
// baselines that choose by the prompt it evicts nothing that is generated: answers are short beside the budget.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class H2oSelector final : public PromptSelector {
 public:
  // REQUIRES: a budget of at least 2. The window is half of it, whatever the options say.
  H2oSelector(const ModelConfig& config, const DecodeOptions& options);
  std::string_view name() const override { return "h2o"; }
  int64_t first_row(int64_t /*num_prompt*/) const override { return 0; }
  // The budget - window largest of each head, ties to the lower position.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
