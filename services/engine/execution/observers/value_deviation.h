// Scores copied positions by the distance between their fresh values and the copies' values
// (kernels/selection/cacheblend/value_deviation.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

class ValueDeviation final : public LayerObserver {
 public:
  // Scores one layer. `scores`: device memory, added to; [candidates], range after range.
  ValueDeviation(int32_t layer, PositionRanges candidates, float* scores)
      : layer_(layer), candidates_(std::move(candidates)), scores_(scores) {}
  absl::Status BeforeKv(const LayerView& view) override;

 private:
  const int32_t layer_;
  const PositionRanges candidates_;
  float* const scores_;
};

}  // namespace spl::engine
