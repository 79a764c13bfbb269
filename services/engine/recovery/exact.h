// Policy `exact`: causal prefill with the model's own visibility (all positions, or its sliding window); the oracle
// that every other policy is measured against (algorithms.md 6.2).
#pragma once

#include <algorithm>

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class ExactPolicy final : public RecoveryPolicy {
 public:
  explicit ExactPolicy(const ModelConfig& config) : config_(config), visibility_(config.num_kv_heads) {}
  std::string_view name() const override { return "exact"; }
  bool is_exact() const override { return true; }
  LayerPlan PlanLayer(int32_t layer) override {
    std::fill(visibility_.begin(), visibility_.end(), config_.visibility(layer));
    return {visibility_};
  }

 private:
  const ModelConfig& config_;  // of the model, which outlives its requests
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
