// Policy `epic` (LegoLink-n, docs/methods/baselines.md): computes fresh text, and the first n tokens of every copy
// except one at the start of the prompt.
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
