#include "services/engine/selection/loopserve.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

LoopServeSelector::LoopServeSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                     const DecodeOptions& options)
    : ChoosingSelector(config, std::move(classes),
                       {.scoring = TokenScoring::kQueryWindow,
                        .window = options.window,
                        .first_layer = options.dense_layers,
                        .budget = options.budget,
                        .recent = std::min(options.recent, options.budget)}) {}

void LoopServeSelector::BeginStep(int64_t kv_len) {
  const int64_t window = plan().window;
  if (step_ >= 0 || (recorded_ + 1 >= window && kv_len > plan().budget)) ++step_;
  SetStep(/*scores=*/true, /*chosen=*/step_ >= 0);
  int64_t turn = 0;
  for (const int32_t number : choosing_layers()) {
    const int64_t since_first = step_ - turn;
    kernels::LayerSelection& selection = layer(number);
    selection.records = true;
    selection.selects = step_ >= 0 && since_first >= 0;
    selection.refresh = selection.selects && since_first % window == 0;
    selection.compact_len = static_cast<int32_t>(recorded_);
    turn = (turn + 1) % window;
  }
  ++recorded_;
}

}  // namespace spl::engine
