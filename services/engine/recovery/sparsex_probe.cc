#include "services/engine/recovery/sparsex_probe.h"

namespace spl::engine {

PrefillStage SparseXProbePolicy::FirstReuseStage(const ReuseLayout& layout) {
  const PositionRanges recovered = Recovered(layout);
  if (recovered.empty()) return SparseXPolicy::FirstReuseStage(layout);
  probed_ = chooses_ = true;
  const int32_t end = options().probe_layers;
  PrefillStage stage{.rows = UnionOf(layout.fresh(), Tail(layout)), .layers = {0, end}, .kv_is_final = false};
  stage.score = {.kind = ScoreKind::kColumnMass,
                 .layer = end - options().score_layers,
                 .candidates = recovered,
                 .probes = stage.rows,
                 .pool_radius = options().score_pool,
                 .k = NumChosen(layout, CountOf(recovered)),
                 .all_layers = true};
  return stage;
}

std::optional<PrefillStage> SparseXProbePolicy::NextStage(const ReuseLayout& layout,
                                                          std::span<const int32_t> selected) {
  if (!chooses_) return std::nullopt;
  chooses_ = false;
  return PrefillStage{.rows = UnionOf(RowsWithoutScores(layout), RangesOf(selected)),
                      .layers = {0, config().num_layers}};
}

}  // namespace spl::engine
