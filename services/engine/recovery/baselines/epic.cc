#include "services/engine/recovery/baselines/epic.h"

#include <algorithm>

namespace spl::engine {

PrefillStage EpicPolicy::FirstReuseStage(const ReuseLayout& layout) {
  PositionRanges rows = layout.fresh();
  for (const PositionRange& range : layout.reused) {
    if (range.begin > 0) rows.push_back({range.begin, std::min(range.end, range.begin + num_tokens_)});
  }
  rows.push_back({layout.num_tokens - 1, layout.num_tokens});
  return {.rows = MergeRanges(std::move(rows)), .layers = {0, config().num_layers}};
}

}  // namespace spl::engine
