#include "services/engine/selection/cascade.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

CascadeSelector::CascadeSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                 const DecodeOptions& options)
    : ChoosingSelector(config, std::move(classes),
                       {.scoring = TokenScoring::kCompactKeys,
                        .num_dims = options.dims,
                        .first_layer = options.dense_layers,
                        .budget = options.budget,
                        .recent = std::min(options.recent, options.budget)}),
      outer_layers_(static_cast<size_t>(config.num_layers)),
      outer_{.scoring = {.scoring = TokenScoring::kQueryWindow,
                         .window = options.window,
                         .first_layer = options.dense_layers,
                         .budget = options.candidates,
                         .recent = std::min(options.recent, options.candidates),
                         .outer = true},
             .layers = outer_layers_},
      kept_(static_cast<size_t>(config.num_layers)) {}

void CascadeSelector::BeginStep(int64_t kv_len) {
  const int64_t window = outer_.scoring.window;
  if (step_ >= 0 || (recorded_ + 1 >= window && kv_len > plan().budget)) ++step_;
  SetStep(/*scores=*/true, /*chosen=*/step_ >= 0);
  int64_t turn = 0;
  for (const int32_t number : choosing_layers()) {
    const int64_t since_first = step_ - turn;
    kernels::LayerSelection& outer = outer_layers_[static_cast<size_t>(number)];
    outer.records = true;
    outer.selects = step_ >= 0 && since_first >= 0;
    outer.refresh = outer.selects && since_first % window == 0;
    outer.compact_len = static_cast<int32_t>(recorded_);
    turn = (turn + 1) % window;

    kernels::LayerSelection& inner = layer(number);
    if (inner.refresh) inner.parity ^= 1;  // the last step wrote the other table, which is valid now
    inner.selects = inner.listed = outer.selects;
    inner.first = outer.refresh;
    inner.refresh = outer.selects && since_first % window % kDimsInterval == 0;
    int32_t& kept = kept_[static_cast<size_t>(number)];
    inner.compact_len = outer.refresh ? 0 : kept;
    if (!outer.selects) continue;
    kept = outer.refresh ? static_cast<int32_t>(std::min<int64_t>(kv_len, outer_.scoring.budget)) : kept + 1;
  }
  ++recorded_;
}

}  // namespace spl::engine
