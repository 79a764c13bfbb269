#include "services/engine/selection/sparcas.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

SparCasSelector::SparCasSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                 const DecodeOptions& options)
    : KeyScoringSelector(config, std::move(classes),
                         {.scoring = TokenScoring::kCompactKeys,
                          .num_dims = options.dims,
                          .first_layer = options.dense_layers,
                          .budget = options.budget,
                          .recent = std::min(options.recent, options.budget)}),
      refresh_interval_(options.refresh_interval) {}

void SparCasSelector::PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) {
  if (selection.refresh) selection.parity ^= 1;  // the last step wrote the other table
  selection.first = step == 0;
  selection.refresh = step == 0 || step % refresh_interval_ == layer % refresh_interval_;
}

}  // namespace spl::engine
