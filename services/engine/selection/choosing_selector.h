// What selectors that choose tokens anew in every step share: when they choose at all, and in which layers and heads.
#pragma once

#include <memory>
#include <vector>

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// Choices begin with the first step whose context is longer than twice the budget, and are made by the heads that see
// all of it, in the layers from the plan's first one on (algorithms.md 6.4); everything else is as without choices.
class ChoosingSelector : public TokenSelector {
 public:
  // `classes` null: every head sees everything.
  ChoosingSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes, const ScoringPlan& plan);
  bool is_exact() const override { return false; }
  void BeginStep(int64_t kv_len) override;
  kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) override;
  uint64_t plan_key() const override;
  bool shares_plan() const override { return classes_ == nullptr || !classes_->of_one_sequence(); }
  ScoringPlan scoring() const override { return plan_; }
  bool Chooses(int32_t layer, int32_t kv_head) const override;
  std::span<const kernels::LayerSelection> layers() const override {
    return active_ ? std::span<const kernels::LayerSelection>(layers_) : std::span<const kernels::LayerSelection>();
  }

 protected:
  // Of a layer that chooses, in the step-th step (from 0) since choices began; `layer` says what the last step did.
  virtual void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) = 0;

 private:
  kernels::HeadVisibility Unchosen(int32_t layer, int32_t kv_head) const;

  const ModelConfig& config_;  // of the model, which outlives its sequences
  const std::shared_ptr<const StreamClasses> classes_;
  const ScoringPlan plan_;
  std::vector<kernels::LayerSelection> layers_;
  bool active_ = false;
  int64_t step_ = 0;
  int64_t written_ = 0;  // positions that the last step with choices had
};

}  // namespace spl::engine
