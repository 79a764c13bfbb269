// Selector `streaming`, a baseline: queries see the first tokens and the last ones (StreamingLLM 3;
// docs/methods/baselines.md).
#pragma once

#include <algorithm>

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class StreamingSelector final : public TokenSelector {
 public:
  StreamingSelector(const ModelConfig& config, const DecodeOptions& options)
      : config_(config),
        first_layer_(options.dense_layers),
        sinks_(std::min(options.sinks, options.budget - 1)),
        window_(options.budget - sinks_) {}
  std::string_view name() const override { return "streaming"; }
  bool is_exact() const override { return false; }
  uint64_t plan_key() const override {
    return ((uint64_t{0xb5} << 56) ^ (static_cast<uint64_t>(window_) << 24) ^ (static_cast<uint64_t>(sinks_) << 8) ^
            static_cast<uint64_t>(first_layer_)) *
           0x9fb21c651e98df25ull;
  }
  kernels::HeadVisibility Select(int32_t layer, int32_t) override {
    const kernels::HeadVisibility own = config_.visibility(layer);
    if (layer < first_layer_ || own.rule != kernels::VisibilityRule::kFull) return own;
    return {.rule = kernels::VisibilityRule::kBand, .num_sinks = sinks_, .window = window_};
  }

 private:
  const ModelConfig& config_;  // the model's; the model outlives its sequences
  const int32_t first_layer_, sinks_, window_;
};

}  // namespace spl::engine
