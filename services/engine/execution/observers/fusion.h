// Blends the new K and V of rows with the K and V that were at their positions before (kernels/kv_copy/fuse_rows.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

class Fusion final : public LayerObserver {
 public:
  explicit Fusion(PositionRanges positions) : positions_(std::move(positions)) {}
  void BeginPass(std::span<const int32_t> positions) override;
  absl::Status BeforeKv(const LayerView& view) override { return Run(view, kernels::FuseStep::kSave); }
  absl::Status AfterKv(const LayerView& view) override { return Run(view, kernels::FuseStep::kBlend); }

 private:
  absl::Status Run(const LayerView& view, kernels::FuseStep step);

  const PositionRanges positions_;
  std::vector<int32_t> rows_;               // rows of the slice
  std::unique_ptr<kernels::Buffer> saved_;  // [max_rows, 2 num_kv_heads * head_dim], as in pages
};

}  // namespace spl::engine
