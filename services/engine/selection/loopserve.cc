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
  const bool enough = recorded_ + 1 >= plan().window && kv_len > plan().budget;
  if (since_ >= 0) ++since_;
  const bool chooses = enough && (since_ < 0 || since_ == plan().window);
  if (chooses) since_ = 0;
  SetStep(/*scores=*/true, /*chosen=*/since_ >= 0);
  for (const int32_t number : choosing_layers()) {
    kernels::LayerSelection& selection = layer(number);
    selection.records = true;
    selection.selects = since_ >= 0;
    selection.refresh = chooses;
    selection.compact_len = static_cast<int32_t>(recorded_);
  }
  ++recorded_;
}

}  // namespace spl::engine
