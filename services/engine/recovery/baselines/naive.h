// Policy `naive`: fresh text is computed, copies are taken as they are (docs/methods/baselines.md): what every recovery
// must beat.
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
