// Selector `sparcas`: every key is scored by the few dimensions in which the query is largest, and the best tokens get
// exact attention (SparCas 3; algorithms.md section 4).
#pragma once

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class SparCasSelector final : public KeyScoringSelector {
 public:
  SparCasSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                  const DecodeOptions& options);
  std::string_view name() const override { return "sparcas"; }

 protected:
  // Dimensions are chosen anew every refresh_interval steps, the layers one after the other, so that no step
  // chooses in more than ceil(layers / interval) of them.
  void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) override;

 private:
  const int32_t refresh_interval_;
};

}  // namespace spl::engine
