// Policy `sparsex`: every row in the dense layers before the boundary, there the attention that fresh text pays to each
// reused token, then only fresh text, the k tokens with the most of it, and the edges (SparseX 4; algorithms.md
// section 1).
#pragma once

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class SparseXPolicy final : public RecoveryPolicy {
 public:
  SparseXPolicy(const ModelConfig& config, const ReuseOptions& options);
  std::string_view name() const override { return "sparsex"; }
  bool reuses_segments() const override { return true; }
  int32_t first_cached_layer() const override { return dense_layers_; }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

  int32_t dense_layers() const { return dense_layers_; }
  // A sixth of the layers of a small dense model, an eighth of a large one or one of experts (algorithms.md
  // section 1: 15–20 % and 10–15 %).
  static int32_t DefaultDenseLayers(const ModelConfig& config);

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;

 private:
  // The last reused tokens, where no fresh text follows them.
  PositionRanges Tail(const ReuseLayout& layout) const;
  // Reused tokens next to fresh text.
  PositionRanges Overflow(const ReuseLayout& layout) const;
  PositionRanges Links(const ReuseLayout& layout) const;

  const ReuseOptions options_;
  const int32_t dense_layers_;
  bool selecting_ = false;  // the first stage is the one before the selection
};

}  // namespace spl::engine
