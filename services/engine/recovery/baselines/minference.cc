#include "services/engine/recovery/baselines/minference.h"

#include <algorithm>
#include <numeric>

namespace spl::engine {
namespace {

constexpr int32_t kForcedColumns = 30, kForcedSlashes = 30;

}  // namespace

void MInferencePolicy::FillTask(int32_t, const kernels::LineRows& rows, LineTask& task,
                                std::span<kernels::HeadVisibility>) const {
  task.samples.resize(std::min(options_.line_samples, rows.num_rows));
  std::iota(task.samples.begin(), task.samples.end(), rows.num_rows - static_cast<int32_t>(task.samples.size()));
  const int32_t keys = rows.num_keys();
  task.options.top_columns = std::min(std::max(options_.line_columns, kForcedColumns), keys);
  task.options.top_offsets = std::min(std::max(options_.line_slashes, kForcedSlashes), keys);
  task.options.forced_columns = std::min(kForcedColumns, keys);
  task.options.forced_offsets = std::min(kForcedSlashes, keys);
}

}  // namespace spl::engine
