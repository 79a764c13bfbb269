// Selector `quest`, a baseline: chooses pages of 16 tokens by the upper bound of their scores (Quest 3;
// docs/methods/baselines.md).
#pragma once

#include <algorithm>
#include <utility>

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class QuestSelector final : public KeyScoringSelector {
 public:
  QuestSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes, const DecodeOptions& options)
      : KeyScoringSelector(config, std::move(classes),
                           {.scoring = TokenScoring::kPageBounds,
                            .first_layer = options.dense_layers,
                            .budget = options.budget,
                            .recent = std::min(options.recent, options.budget)}) {}
  std::string_view name() const override { return "quest"; }

 protected:
  void PlanLayer(int32_t, int64_t step, kernels::LayerSelection& selection) override {
    selection.first = selection.refresh = step == 0;
  }
};

}  // namespace spl::engine
