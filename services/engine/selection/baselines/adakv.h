// Selector `adakv`, a baseline: like SnapKV, but the heads of a layer share its budget. A head with spread-out
// attention keeps more than one with concentrated attention (Ada-KV 3; docs/methods/baselines.md).
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class AdaKvSelector final : public PromptSelector {
 public:
  static constexpr int32_t kPoolRadius = 3;  // a score is the best of seven neighbours
  static constexpr double kFloor = 0.2;      // f: share of the mean budget that every head gets, as published code has it
  using PromptSelector::PromptSelector;
  std::string_view name() const override { return "adakv"; }
  // Keeps the round((1 - f) n_h + f B) largest of head h. B = budget - window; n_h is the number of positions of head h
  // among the num_kv_heads B largest of the layer (ties to the lower head, then to the lower position).
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
