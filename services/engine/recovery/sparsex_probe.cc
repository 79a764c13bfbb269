#include "services/engine/recovery/sparsex_probe.h"

namespace spl::engine {

PositionRanges SparseXProbePolicy::Probes(const ReuseLayout& layout) const {
  return UnionOf(layout.fresh(), Tail(layout));
}

int64_t SparseXProbePolicy::NumProbed(const ReuseLayout& layout) const {
  return NumChosen(layout, CountOf(Recovered(layout)), kProbeShare);
}

int64_t SparseXProbePolicy::CostOf(const ReuseLayout& layout) const {
  return CountOf(Probes(layout)) * end_ +
         (CountOf(RowsWithoutScores(layout)) + NumProbed(layout)) * config().num_layers;
}

void SparseXProbePolicy::Prepare(const ReuseLayout& layout) {
  SparseXPolicy::Prepare(layout);
  end_ = options().probe_layers > 0 ? options().probe_layers : config().num_layers;
  probes_ = options().probe_layers > 0 || CostOf(layout) < SparseXPolicy::CostOf(layout);
}

PrefillStage SparseXProbePolicy::FirstReuseStage(const ReuseLayout& layout) {
  const PositionRanges recovered = Recovered(layout);
  if (!probes_ || recovered.empty()) return SparseXPolicy::FirstReuseStage(layout);
  probed_ = chooses_ = true;
  const int32_t scoring = options().score_layers > 0 ? options().score_layers : (end_ + 1) / 2;
  PrefillStage stage{.rows = Probes(layout), .layers = {0, end_}, .kv_is_final = false};
  stage.score = {.kind = ScoreKind::kColumnMass,
                 .layer = end_ - scoring,
                 .candidates = recovered,
                 .probes = stage.rows,
                 .pool_radius = options().score_pool,
                 .k = NumProbed(layout),
                 .all_layers = true};
  return stage;
}

std::optional<PrefillStage> SparseXProbePolicy::NextStage(const ReuseLayout& layout,
                                                          std::span<const int32_t> selected) {
  if (!probed_) return SparseXPolicy::NextStage(layout, selected);
  if (!chooses_) return std::nullopt;
  chooses_ = false;
  return PrefillStage{.rows = UnionOf(RowsWithoutScores(layout), RangesOf(selected)),
                      .layers = {0, config().num_layers}};
}

}  // namespace spl::engine
