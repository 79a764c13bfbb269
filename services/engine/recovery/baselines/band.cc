#include "services/engine/recovery/baselines/band.h"

namespace spl::engine {

LayerPlan BandPolicy::PlanLayer(int32_t layer) {
  const kernels::HeadVisibility own = config().visibility(layer);
  kernels::HeadVisibility seen = own;
  if (layer >= options_.dense_layers &&
      (own.rule != kernels::VisibilityRule::kBand || own.window > options_.band_window))
    // Behind a window of the model's own there are no sinks, as elsewhere (stream_classes.h).
    seen = {.rule = kernels::VisibilityRule::kBand,
            .num_sinks = own.rule == kernels::VisibilityRule::kBand ? own.num_sinks : options_.band_sinks,
            .window = options_.band_window};
  visibility_.assign(static_cast<size_t>(config().num_kv_heads), seen);
  return {.visibility = visibility_};
}

}  // namespace spl::engine
