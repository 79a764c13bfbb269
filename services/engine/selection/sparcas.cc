#include "services/engine/selection/sparcas.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace spl::engine {
namespace {

constexpr int32_t kFirstInterval = 4;

}  // namespace

int64_t SparCasSelector::IntervalAt(int64_t step) const {
  return std::min<int64_t>(refresh_interval_,
                           std::max<int64_t>(first_interval_, std::bit_floor(static_cast<uint64_t>(step)) / 4));
}

SparCasSelector::SparCasSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                 const DecodeOptions& options)
    : KeyScoringSelector(config, std::move(classes),
                         {.scoring = options.packed_keys ? TokenScoring::kPackedKeys : TokenScoring::kCompactKeys,
                          .num_dims = options.dims,
                          .first_layer = options.dense_layers,
                          .budget = options.budget,
                          .recent = std::min(options.recent, options.budget)}),
      first_interval_(options.packed_keys ? options.refresh_interval : kFirstInterval),
      refresh_interval_(options.refresh_interval) {}

void SparCasSelector::PlanLayer(int32_t layer, int64_t step, kernels::LayerSelection& selection) {
  if (selection.refresh) selection.parity ^= 1;  // the last step wrote the other table, which is valid now
  selection.first = step == 0;
  const int64_t interval = IntervalAt(step);
  selection.refresh = step == 0 || skipped() >= refresh_interval_ || step % interval == layer % interval;
}

}  // namespace spl::engine
