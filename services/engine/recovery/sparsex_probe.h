// Policy `sparsex` with probe_layers (docs/methods/sparsex.md, "A probe instead of dense layers"; the two stages are
// ProphetKV's). The fresh text alone runs through the first layers over the copies as they are, and the last of these
// layers score the reused tokens by SparseX's equations. Then fresh text, chosen tokens and edges of segments are
// computed from layer 0 on, through all layers.
//
// No layer computes every row, so the depth at which rows are chosen costs little: the fresh text's rows in these
// layers. But the probe sees copies that lack their context, and rows that are not chosen keep theirs in all layers.
#pragma once

#include "services/engine/recovery/sparsex.h"

namespace spl::engine {

class SparseXProbePolicy final : public SparseXPolicy {
 public:
  // REQUIRES: options.probe_layers > 0, and the options are valid (ValidateReuseOptions).
  using SparseXPolicy::SparseXPolicy;
  int32_t first_cached_layer() const override { return 0; }
  int32_t probe_layers() const override { return probed_ ? options().probe_layers : 0; }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;

 private:
  bool probed_ = false;   // the prompt has copies that are recovered
  bool chooses_ = false;  // the probe was given out, the rows that it chooses were not
};

}  // namespace spl::engine
