// Gives local heads that look away from something they need the model's own visibility back, layer by layer
// (services/engine/recovery/edge_restore.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"

namespace spl::engine {

// Serves one prompt on one rank, in all of its passes. A pass that ends with the prompt's last position asks its last
// rows, and must have no other slice.
class HeadRestore final : public LayerObserver {
 public:
  // `most`: of the rank's heads, over all layers, at most so many are restored. `prompt_tokens`: where the prompt ends.
  HeadRestore(int32_t most, int32_t prompt_tokens) : left_(most), prompt_tokens_(prompt_tokens) {}
  void BeginPass(std::span<const int32_t> positions) override;
  bool wants_lse(int32_t /*layer*/, const LayerPlan& plan) const override { return Asks(plan); }
  absl::Status AfterAttention(const LayerView& view) override;

  // layer * the model's num_kv_heads + head.
  const std::vector<int32_t>& restored() const { return restored_; }

 private:
  bool Asks(const LayerPlan& plan) const { return num_probes_ > 0 && !plan.restore_above.empty(); }

  int32_t left_;
  const int32_t prompt_tokens_;
  int32_t num_probes_ = 0;  // of the pass
  std::vector<int32_t> restored_;
};

}  // namespace spl::engine
