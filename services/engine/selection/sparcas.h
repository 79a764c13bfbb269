// Selector `sparcas`: every key is scored by the few dimensions in which the query is largest, and the best tokens get
// exact attention (SparCas 3; docs/methods/sparcas.md).
#pragma once

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class SparCasSelector final : public KeyScoringSelector {
 public:
  SparCasSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                  const DecodeOptions& options);
  std::string_view name() const override { return "sparcas"; }

 protected:
  // Dimensions are chosen anew every IntervalAt steps, the layers one after the other, so that no step chooses in more
  // than ceil(layers / interval) of them.
  void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) override;

 private:
  // Every four steps at first, then every quarter of the steps taken so far, up to refresh_interval. What a query looks
  // for changes most where an answer begins: with 64 from the first step on, the dimensions that suit the first value
  // of a list choose the tokens of all the others.
  int64_t IntervalAt(int64_t step) const;

  const int32_t refresh_interval_;
};

}  // namespace spl::engine
