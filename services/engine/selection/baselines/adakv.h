// Selector `adakv`, a baseline: as SnapKV, but the heads of a layer share its budget: a head whose attention is spread
// keeps more than one whose attention is not (Ada-KV 3; docs/methods/baselines.md).
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

class AdaKvSelector final : public PromptSelector {
 public:
  static constexpr int32_t kPoolRadius = 3;  // the best of seven neighbours
  static constexpr double kFloor = 0.5;      // of the mean budget that every head has: f
  using PromptSelector::PromptSelector;
  std::string_view name() const override { return "adakv"; }
  // With B = budget - window and n_h the positions of head h among the num_kv_heads B largest of the layer (ties to the
  // lower head, then to the lower position): the round((1 - f) n_h + f B) largest of head h.
  std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const override;
};

}  // namespace spl::engine
