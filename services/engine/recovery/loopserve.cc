#include "services/engine/recovery/loopserve.h"

#include <algorithm>

namespace spl::engine {

bool LoopServePolicy::UsesLines(const ReuseLayout& layout) const {
  return layout.active().size() >= options_.line_min_span;
}

void LoopServePolicy::FillTask(int32_t layer, const kernels::LineRows& rows, LineTask& task,
                               std::span<kernels::HeadVisibility> visibility) const {
  task.options.alpha = static_cast<float>(options_.line_alpha);
  task.samples = kernels::SampleRows(rows.num_rows, LineSeed(rows, layer), options_.line_samples);
  if (map_ == nullptr) return;
  std::erase_if(task.kv_heads, [&](int32_t head) {
    visibility[head] = PrefillVisibility(config(), *map_, layer, head);
    return !map_->in_prefill(layer, head).is_global;
  });
}

}  // namespace spl::engine
