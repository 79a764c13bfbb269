// What selectors that choose tokens on the device share: in which layers and heads, and what the others see.
#pragma once

#include <memory>
#include <vector>

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// Choices are made by the heads that see everything, in the layers from the plan's first one on
// (docs/methods/splice.md, "Who goes with whom"); everything else is as without choices.
class ChoosingSelector : public TokenSelector {
 public:
  // `classes` null: every head sees everything.
  ChoosingSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes, const ScoringPlan& plan);
  bool is_exact() const override { return false; }
  kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) override;
  uint64_t plan_key() const override;
  bool shares_plan() const override { return classes_ == nullptr || !classes_->of_one_sequence(); }
  ScoringPlan scoring() const override { return plan_; }
  // Select gives kSelected for these streams in a step that attends to what was chosen or listed.
  bool Chooses(int32_t layer, int32_t kv_head) const override;
  std::span<const kernels::LayerSelection> layers() const override {
    return scores_ ? std::span<const kernels::LayerSelection>(layers_) : std::span<const kernels::LayerSelection>();
  }

 protected:
  const ScoringPlan& plan() const { return plan_; }
  // What BeginStep of a selector decides: whether the device has something to do in this step at all, and whether heads
  // attend to what was chosen.
  void SetStep(bool scores, bool chosen) {
    scores_ = scores;
    chosen_ = chosen;
  }
  // Of a layer that chooses; what the last step had stays until it is changed.
  kernels::LayerSelection& layer(int32_t number) { return layers_[static_cast<size_t>(number)]; }
  // Layers in which some head chooses, ascending.
  std::span<const int32_t> choosing_layers() const { return choosing_layers_; }

 private:
  kernels::HeadVisibility Unchosen(int32_t layer, int32_t kv_head) const {
    return VisibilityOf(classes_.get(), config_, layer, kv_head);
  }

  const ModelConfig& config_;  // of the model, which outlives its sequences
  const std::shared_ptr<const StreamClasses> classes_;
  const ScoringPlan plan_;
  std::vector<int32_t> choosing_layers_;
  std::vector<kernels::LayerSelection> layers_;
  bool scores_ = false;
  bool chosen_ = false;
};

// Selectors that score every key in every step, from the first one on whose context is longer than twice the budget:
// below that a choice costs more than it saves.
class KeyScoringSelector : public ChoosingSelector {
 public:
  using ChoosingSelector::ChoosingSelector;
  void BeginStep(int64_t kv_len) override;

 protected:
  // In the step-th step (from 0) since choices began; `selection` says what the last one did.
  virtual void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) = 0;

 private:
  bool active_ = false;
  int64_t step_ = 0;
  int64_t written_ = 0;  // positions that the last step with choices had
};

}  // namespace spl::engine
