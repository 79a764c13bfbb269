#include "services/engine/recovery/baselines/cacheblend.h"

#include <algorithm>
#include <cmath>

namespace spl::engine {

PrefillStage CacheBlendPolicy::FirstReuseStage(const ReuseLayout& layout) {
  const int32_t dense_layers = kCheckLayer + 1;
  if (dense_layers >= config().num_layers) return AllRows(layout);
  selecting_ = true;
  PrefillStage stage{.rows = {layout.active()}, .layers = {0, dense_layers}, .keep_hidden = true};
  const int64_t reused = CountOf(layout.reused);
  stage.score = {.kind = ScoreKind::kValueDeviation,
                 .layer = kCheckLayer,
                 .candidates = layout.reused,
                 .k = std::min<int64_t>(reused, std::llround(share_ * static_cast<double>(reused)))};
  return stage;
}

std::optional<PrefillStage> CacheBlendPolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (!selecting_) return std::nullopt;
  selecting_ = false;
  const PositionRange last{layout.num_tokens - 1, layout.num_tokens};
  return PrefillStage{.rows = UnionOf(UnionOf(layout.fresh(), RangesOf(selected)), {&last, 1}),
                      .layers = {kCheckLayer + 1, config().num_layers}};
}

}  // namespace spl::engine
