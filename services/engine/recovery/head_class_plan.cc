#include "services/engine/recovery/head_class_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {
namespace {

constexpr int32_t kQuestionTokensMax = 512;  // fresh text at the end that always runs through feed-forward
constexpr double kOfflineMargin = 1.25;      // over the 99th percentile that profiling saw

}  // namespace

void HeadClassPlan::Begin(const ReuseLayout& layout, int32_t dense_layers) {
  dense_layers_ = dense_layers;
  // The last tokens, and the question: what stands behind the last reused text.
  const int32_t recent = layout.num_tokens - std::max(ffn_.recent, 1);
  const int32_t question = layout.reused.empty() ? layout.num_tokens : layout.reused.back().end;
  keep_from_ = std::min(recent, std::max(question, layout.num_tokens - kQuestionTokensMax));
}

// What the request says, and the rest from the map.
FfnSchedule HeadClassPlan::ScheduleOf(FfnSchedule of_map, const ReuseOptions& options) {
  if (options.ffn_mass >= 0) of_map.mass = options.ffn_mass;
  if (options.ffn_dense_layers >= 0) of_map.dense_layers = options.ffn_dense_layers;
  if (options.ffn_recent >= 0) of_map.recent = options.ffn_recent;
  if (options.ffn_deep_layer >= 0) of_map.deep_layer = options.ffn_deep_layer;
  if (options.ffn_deep_mass >= 0) of_map.deep_mass = options.ffn_deep_mass;
  return of_map;
}

FfnPlan HeadClassPlan::FeedForward(int32_t layer) const {
  const int32_t dense = ffn_.dense_layers >= 0 ? ffn_.dense_layers : config_.num_layers / 4;
  if (layer < std::max(dense, dense_layers_)) return {};
  const bool deep = ffn_.deep_layer >= 0 && layer >= ffn_.deep_layer;
  return {deep ? ffn_.deep_mass : ffn_.mass, keep_from_};
}

LayerPlan HeadClassPlan::Layer(int32_t layer) {
  const kernels::HeadVisibility own = config_.visibility(layer);
  visibility_.assign(static_cast<size_t>(config_.num_kv_heads), own);
  if (layer < dense_layers_) return {.visibility = visibility_};
  thresholds_.assign(visibility_.size(), std::numeric_limits<float>::infinity());
  bool any_local = false;
  for (int32_t h = 0; h < config_.num_kv_heads; ++h) {
    const auto i = static_cast<size_t>(h);
    const HeadClass head = sees_ == Sees::kAsInPrefill ? map_.in_prefill(layer, h) : map_.served(layer, h);
    visibility_[i] = ClassVisibility(head, own);
    if (head.is_global) continue;
    any_local = true;
    const size_t stream = static_cast<size_t>(layer) * visibility_.size() + i;
    const double offline = map_.profile().edge_mass_q99.empty() ? 0 : map_.profile().edge_mass_q99[stream];
    thresholds_[i] = static_cast<float>(std::max(options_.restore_threshold, kOfflineMargin * offline));
  }
  LayerPlan plan{.visibility = visibility_, .ffn = FeedForward(layer)};
  if (any_local && restores()) plan.restore_above = thresholds_;
  return plan;
}

int32_t HeadClassPlan::RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const {
  int64_t local = 0;
  for (int32_t layer = dense_layers_; layer < config_.num_layers; ++layer) {
    for (int32_t h = first_kv_head; h < first_kv_head + num_kv_heads; ++h) local += !map_.served(layer, h).is_global;
  }
  return static_cast<int32_t>(std::floor(options_.restore_share * static_cast<double>(local) + 1e-9));
}

std::vector<int32_t> HeadClassPlan::GlobalHeads(int32_t layer) const {
  std::vector<int32_t> heads;
  if (options_.score_all_heads) return heads;
  for (int32_t h = 0; h < config_.num_kv_heads; ++h) {
    if (map_.at(layer, h).is_global) heads.push_back(h);
  }
  if (heads.size() == static_cast<size_t>(config_.num_kv_heads)) heads.clear();
  return heads;
}

}  // namespace spl::engine
