// Selector `sparcas`: scores every key by the few dimensions in which the query is largest, and gives the best tokens
// exact attention (SparCas 3; docs/methods/sparcas.md).
#pragma once

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class SparCasSelector : public KeyScoringSelector {
 public:
  SparCasSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                  const DecodeOptions& options);
  std::string_view name() const override { return "sparcas"; }

 protected:
  // Each layer chooses its dimensions again every IntervalAt steps. The layers take turns, so that no step chooses in
  // more than ceil(layers / interval) of them. Behind refresh_interval steps without choices all layers choose them.
  void PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) override;

 private:
  // Four steps at first, then a quarter of the steps so far rounded down to a power of two, up to refresh_interval.
  // Queries change most at the start of an answer: with 64 from the first step on, the dimensions that suit the first
  // value of a list would choose the tokens of all other values. Packed keys have twice the dimensions, and
  // refresh_interval from the first step on.
  int64_t IntervalAt(int64_t step) const;

  const int32_t first_interval_, refresh_interval_;
};

}  // namespace spl::engine
