// Selector `dense`: a query attends to every token that the model itself lets it see (all, or its sliding window). The
// reference for every other selector.
#pragma once

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class DenseSelector final : public TokenSelector {
 public:
  explicit DenseSelector(const ModelConfig& config) : config_(config) {}
  std::string_view name() const override { return "dense"; }
  bool is_exact() const override { return true; }
  uint64_t plan_key() const override { return 0; }
  kernels::HeadVisibility Select(int32_t layer, int32_t /*kv_head*/) override { return config_.visibility(layer); }

 private:
  const ModelConfig& config_;  // the model's; the model outlives its sequences
};

}  // namespace spl::engine
