// Policy `cacheblend` (docs/methods/baselines.md, [CB]). Every row is computed up to the check layer. That layer
// compares fresh and cached values by their squared distance. After it only fresh text and the rows with the largest
// distance are computed.
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class CacheBlendPolicy final : public RecoveryPolicy {
 public:
  CacheBlendPolicy(const ModelConfig& config, double share) : RecoveryPolicy(config), share_(share) {}
  std::string_view name() const override { return "cacheblend"; }
  bool reuses_segments() const override { return true; }
  int32_t first_cached_layer() const override { return kCheckLayer; }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;

 private:
  static constexpr int32_t kCheckLayer = 1;
  const double share_;
  bool selecting_ = false;  // the stage before the selection was given out
};

}  // namespace spl::engine
