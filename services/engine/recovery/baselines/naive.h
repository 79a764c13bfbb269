// Policy `naive` (docs/methods/baselines.md): computes fresh text and takes copies as they are. Every recovery must
// beat it.
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class NaivePolicy final : public RecoveryPolicy {
 public:
  using RecoveryPolicy::RecoveryPolicy;
  std::string_view name() const override { return "naive"; }
  bool reuses_segments() const override { return true; }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
};

}  // namespace spl::engine
