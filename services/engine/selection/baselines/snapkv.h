// Selector `snapkv`, a baseline: each head keeps the last rows of the prompt and the positions that these rows attend
// to most, where a position's score is the mean over its neighbours (SnapKV 4; docs/methods/baselines.md).
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class SnapKvSelector final : public PromptSelector {
 public:
  static constexpr int32_t kPoolRadius = 2;  // a score is the mean of five neighbours
  using PromptSelector::PromptSelector;
  std::string_view name() const override { return "snapkv"; }
  // Keeps the budget - window largest of each head, ties to the lower position.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
