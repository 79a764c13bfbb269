// Policy `exact`: causal prefill of every row with the model's own visibility; the oracle that every other policy is
// measured against (algorithms.md 6.2).
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class ExactPolicy final : public RecoveryPolicy {
 public:
  using RecoveryPolicy::RecoveryPolicy;
  std::string_view name() const override { return "exact"; }
  bool reuses_segments() const override { return false; }
};

}  // namespace spl::engine
