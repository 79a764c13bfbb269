// Policy `cacheblend` (docs/methods/baselines.md, [CB]): every row in the layers up to the check layer, there the
// squared distance between fresh and cached values, then only the rows with the largest distance, and fresh text.
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
  bool selecting_ = false;  // the first stage is the one before the selection
};

}  // namespace spl::engine
