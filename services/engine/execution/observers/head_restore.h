// Restores local heads whose attention is cut off by their window: gives them the model's own visibility back, layer by
// layer (services/engine/recovery/edge_restore.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"

namespace spl::engine {

// Serves one prompt on one rank, in all of its passes. A pass that ends with the prompt's last position probes its last
// rows; such a pass has no other slice.
class HeadRestore final : public LayerObserver {
 public:
  // `most`: heads of the rank to restore at most, over all layers. `prompt_tokens`: length of the prompt.
  HeadRestore(int32_t most, int32_t prompt_tokens) : left_(most), prompt_tokens_(prompt_tokens) {}
  void BeginPass(std::span<const int32_t> positions) override;
  bool wants_lse(int32_t /*layer*/, const LayerPlan& plan) const override { return Asks(plan); }
  absl::Status AfterAttention(const LayerView& view) override;

  // Restored heads: layer * the model's num_kv_heads + head.
  const std::vector<int32_t>& restored() const { return restored_; }

 private:
  bool Asks(const LayerPlan& plan) const { return num_probes_ > 0 && !plan.restore_above.empty(); }

  int32_t left_;
  const int32_t prompt_tokens_;
  int32_t num_probes_ = 0;  // rows of the pass that are probes
  std::vector<int32_t> restored_;
};

}  // namespace spl::engine
