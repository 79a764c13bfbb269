#include "services/engine/recovery/recovery_policy.h"

#include <algorithm>

#include "services/engine/cache/segment_summary.h"

namespace spl::engine {

SegmentSummary RecoveryPolicy::LocalSummaryOf(const PositionRange& /*segment*/) const { return {}; }

LayerPlan RecoveryPolicy::PlanLayer(int32_t layer) {
  std::fill(visibility_.begin(), visibility_.end(), config_.visibility(layer));
  return {visibility_};
}

PrefillStage RecoveryPolicy::AllRows(const ReuseLayout& layout) const {
  return {.rows = {layout.active()}, .layers = {0, config_.num_layers}};
}

PrefillStage RecoveryPolicy::FirstStage(const ReuseLayout& layout) {
  Prepare(layout);
  return layout.reused.empty() ? FirstColdStage(layout) : FirstReuseStage(layout);
}

PrefillStage RecoveryPolicy::FirstReuseStage(const ReuseLayout& layout) { return AllRows(layout); }
PrefillStage RecoveryPolicy::FirstColdStage(const ReuseLayout& layout) { return AllRows(layout); }

std::optional<PrefillStage> RecoveryPolicy::NextStage(const ReuseLayout&, std::span<const int32_t>) {
  return std::nullopt;
}

ReuseLayout ReuseLayout::Only(std::span<const PositionRange> only) const {
  ReuseLayout left{static_cast<int32_t>(CountOf(only)), num_prefix, {}, {}, copies_are_whole};
  for (size_t i = 0; i < reused.size(); ++i) {
    const PositionRanges numbered = NumberedWithin({&reused[i], 1}, only);
    if (numbered.empty()) continue;
    left.reused.push_back(numbered.front());  // nothing else stands in a copy: what is left of it is one range
    left.contexts.push_back(contexts[i]);
  }
  return left;
}

}  // namespace spl::engine
