#include "services/engine/recovery/line_policy.h"

#include <algorithm>
#include <numeric>

namespace spl::engine {
namespace {

constexpr int32_t kHeldOutRows = 16;
// Of the layers with lines, one in so many measures fidelity and cells: that takes a second attention over 16 rows and
// a copy of the bitmaps to the host.
constexpr int32_t kMeasureEvery = 8;

}  // namespace

uint64_t LineSeed(const kernels::LineRows& rows, int32_t layer) {
  uint64_t x = static_cast<uint64_t>(rows.first_position) << 32 ^ static_cast<uint64_t>(rows.num_rows);
  x += static_cast<uint64_t>(layer + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  return x ^ x >> 27;
}

std::vector<int32_t> HeldOutRows(int32_t num_rows, std::span<const int32_t> samples, uint64_t seed, int32_t count) {
  std::vector<int32_t> others(num_rows);
  std::iota(others.begin(), others.end(), 0);
  std::vector<int32_t> free;
  std::set_difference(others.begin(), others.end(), samples.begin(), samples.end(), std::back_inserter(free));
  std::vector<int32_t> rows;
  // Spread over all; SampleRows would take the last ones, too, which the sample resembles most.
  const auto num_free = static_cast<int64_t>(free.size());
  const int64_t parts = std::min<int64_t>(count, num_free);
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t begin = num_free * i / parts, end = num_free * (i + 1) / parts;
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    rows.push_back(free[begin + static_cast<int64_t>((seed >> 33) % (end - begin))]);
  }
  return rows;
}

bool LinePolicy::Chooses(const ReuseLayout& layout) const {
  if (!layout.reused.empty() || !UsesLines(layout)) return false;
  for (int32_t layer = dense_layers(); layer < config().num_layers; ++layer) {
    if (config().visibility(layer).rule == kernels::VisibilityRule::kFull) return true;
  }
  return false;
}

void LinePolicy::Prepare(const ReuseLayout& layout) {
  uses_lines_ = Chooses(layout);
  rows_ = {layout.num_prefix, layout.active().size()};
  next_layer_ = config().num_layers;
}

PrefillStage LinePolicy::FirstColdStage(const ReuseLayout& layout) {
  const int32_t dense = std::min(dense_layers(), config().num_layers);
  if (!uses_lines_ || dense >= config().num_layers) return AllRows(layout);
  next_layer_ = dense;
  if (dense == 0) return LayerStage(layout, next_layer_++);
  return {.rows = {layout.active()}, .layers = {0, dense}, .keep_hidden = true};
}

std::optional<PrefillStage> LinePolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t>) {
  if (next_layer_ >= config().num_layers) return std::nullopt;
  return LayerStage(layout, next_layer_++);
}

PrefillStage LinePolicy::LayerStage(const ReuseLayout& layout, int32_t layer) const {
  return {.rows = {layout.active()},
          .layers = {layer, layer + 1},
          .keep_hidden = layer + 1 < config().num_layers,
          .whole = true};
}

LayerPlan LinePolicy::PlanLayer(int32_t layer) {
  const kernels::HeadVisibility own = config().visibility(layer);
  visibility_.assign(static_cast<size_t>(config().num_kv_heads), own);
  LayerPlan plan{.visibility = visibility_};
  // A layer with a sliding window is a slash band already.
  if (!uses_lines_ || layer < dense_layers() || own.rule != kernels::VisibilityRule::kFull) return plan;
  task_ = {};
  task_.kv_heads.resize(visibility_.size());
  std::iota(task_.kv_heads.begin(), task_.kv_heads.end(), 0);
  FillTask(layer, rows_, task_, visibility_);
  if ((layer - dense_layers()) % kMeasureEvery == 0)
    task_.held_out = HeldOutRows(rows_.num_rows, task_.samples, LineSeed(rows_, layer), kHeldOutRows);
  if (!task_.kv_heads.empty()) plan.lines = &task_;
  return plan;
}

}  // namespace spl::engine
