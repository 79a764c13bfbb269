// Base of the selectors that choose tokens on the device: the layers and heads that choose, and the visibility of the
// others.
#pragma once

#include <memory>
#include <vector>

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// Heads that see everything choose, in the layers from the plan's first one on (docs/methods/splice.md,
// "Combinations"). All other heads and layers are as without choices.
class ChoosingSelector : public TokenSelector {
 public:
  // `classes`: null: every head sees everything.
  ChoosingSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes, const ScoringPlan& plan);
  bool is_exact() const override { return false; }
  kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) override;
  uint64_t plan_key() const override;
  bool shares_plan() const override { return classes_ == nullptr || !classes_->of_one_sequence(); }
  ScoringPlan scoring() const override { return plan_; }
  // Streams for which Select returns kSelected or kElsewhere, in a step that attends to what was chosen or listed.
  bool Chooses(int32_t layer, int32_t kv_head) const override;
  std::span<const kernels::LayerSelection> layers() const override {
    return scores_ ? std::span<const kernels::LayerSelection>(layers_) : std::span<const kernels::LayerSelection>();
  }

 protected:
  const ScoringPlan& plan() const { return plan_; }
  // BeginStep of a selector calls this. `scores`: the device has something to do in this step; `chosen`: heads of
  // layers that select or are listed attend to what was chosen.
  void SetStep(bool scores, bool chosen) {
    scores_ = scores;
    chosen_ = chosen;
  }
  // Selection of a layer that chooses. The last step's values stay until they are changed.
  kernels::LayerSelection& layer(int32_t number) { return layers_[number]; }
  // Layers in which some head chooses, ascending.
  std::span<const int32_t> choosing_layers() const { return choosing_layers_; }
  kernels::HeadVisibility Unchosen(int32_t layer, int32_t kv_head) const {
    return VisibilityOf(classes_.get(), config_, layer, kv_head);
  }
  const ModelConfig& config() const { return config_; }

 private:
  bool Attends(int32_t layer) const { return chosen_ && (layers_[layer].selects || layers_[layer].listed); }

  const ModelConfig& config_;  // the model's; the model outlives its sequences
  const std::shared_ptr<const StreamClasses> classes_;
  const ScoringPlan plan_;
  std::vector<int32_t> choosing_layers_;
  std::vector<kernels::LayerSelection> layers_;
  bool scores_ = false;
  bool chosen_ = false;
};

// Base of the selectors that score every key in every step. They begin at the first step whose context is longer than
// twice the budget: below that a choice costs more than it saves.
class KeyScoringSelector : public ChoosingSelector {
 public:
  using ChoosingSelector::ChoosingSelector;
  void BeginStep(int64_t kv_len) override;

 protected:
  // Plans a layer for step number `step` with choices, from 0. On entry `selection` holds the plan of the last step
  // with choices.
  virtual void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) = 0;
  // The next step attends to everything. Later ones may choose again: they append the keys that were left out.
  void Rest() { SetStep(/*scores=*/false, /*chosen=*/false); }
  // Steps between this one and the last one with choices. For PlanLayer.
  int64_t skipped() const { return skipped_; }

 private:
  bool active_ = false;
  int64_t step_ = 0;
  int64_t skipped_ = 0;
  int64_t written_ = 0;  // number of positions in the last step with choices
};

}  // namespace spl::engine
