#include "services/engine/recovery/baselines/naive.h"

namespace spl::engine {

PrefillStage NaivePolicy::FirstReuseStage(const ReuseLayout& layout) {
  const PositionRange last{layout.num_tokens - 1, layout.num_tokens};  // its logits give the first token
  return {.rows = UnionOf(layout.fresh(), {&last, 1}), .layers = {0, config().num_layers}};
}

}  // namespace spl::engine
