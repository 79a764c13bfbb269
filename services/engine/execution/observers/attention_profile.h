// Shows the attention of a pass, beside the attention with another visibility for every head. For profiling.
#pragma once

#include <functional>

#include "services/engine/execution/observers/layer_observer.h"

namespace spl::engine {

// One layer of an observed pass, on the host; valid during the call. If lse_other covers some of the keys of lse, 1 -
// exp(lse_other - lse) is the attention mass of the other keys.
struct AttentionObservation {
  int32_t layer = 0;
  std::span<const float> out;        // [rows, num_qo_heads, head_dim]
  std::span<const float> lse;        // [rows, num_qo_heads], over everything that the model lets a row see
  std::span<const float> lse_other;  // the same, over what the other visibility lets it see
};

// For a pass of one slice on a model of one rank. Costs a second attention and a copy to the host in each layer.
class AttentionProfile final : public LayerObserver {
 public:
  AttentionProfile(const kernels::HeadVisibility& other, std::function<void(const AttentionObservation&)> observe)
      : other_(other), observe_(std::move(observe)) {}
  bool wants_lse(int32_t /*layer*/, const LayerPlan& /*plan*/) const override { return true; }
  absl::Status AfterAttention(const LayerView& view) override;

 private:
  const kernels::HeadVisibility other_;
  const std::function<void(const AttentionObservation&)> observe_;
};

}  // namespace spl::engine
