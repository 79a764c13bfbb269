// Selector `snapkv`, a baseline: of each head the positions of the prompt that its last rows attend to most, a position
// counting as the mean of its neighbours, and these rows (SnapKV 4; docs/methods/baselines.md).
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class SnapKvSelector final : public PromptSelector {
 public:
  static constexpr int32_t kPoolRadius = 2;  // five neighbours
  using PromptSelector::PromptSelector;
  std::string_view name() const override { return "snapkv"; }
  // The budget - window largest of each head, ties to the lower position.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
