// Policy `exact`: dense causal prefill; the oracle that every other policy is measured against (algorithms.md 6.2).
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class ExactPolicy final : public RecoveryPolicy {
 public:
  explicit ExactPolicy(const ModelConfig& config) : visibility_(config.num_kv_heads) {}
  std::string_view name() const override { return "exact"; }
  bool is_exact() const override { return true; }
  LayerPlan PlanLayer(int32_t /*layer*/) override { return {visibility_}; }

 private:
  std::vector<kernels::HeadVisibility> visibility_;  // kFull for every head
};

}  // namespace spl::engine
