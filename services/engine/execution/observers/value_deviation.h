// Scores copied positions by how far their fresh values are from the copies'
// (kernels/selection/cacheblend/value_deviation.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

class ValueDeviation final : public LayerObserver {
 public:
  // In one layer. `scores`: device memory, added to; [candidates], the ranges behind one another.
  ValueDeviation(int32_t layer, PositionRanges candidates, float* scores)
      : layer_(layer), candidates_(std::move(candidates)), scores_(scores) {}
  absl::Status BeforeKv(const LayerView& view) override;

 private:
  const int32_t layer_;
  const PositionRanges candidates_;
  float* const scores_;
};

}  // namespace spl::engine
