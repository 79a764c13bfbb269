// Policy `epic` (LegoLink-n): fresh text and the first n tokens of every copy but the prompt's first are computed
// (docs/methods/baselines.md).
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class EpicPolicy final : public RecoveryPolicy {
 public:
  EpicPolicy(const ModelConfig& config, int32_t num_tokens) : RecoveryPolicy(config), num_tokens_(num_tokens) {}
  std::string_view name() const override { return "epic"; }
  bool reuses_segments() const override { return true; }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;

 private:
  const int32_t num_tokens_;
};

}  // namespace spl::engine
