#include "services/engine/recovery/splice.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace spl::engine {

void SplicePolicy::Prepare(const ReuseLayout& layout) {
  SparseXProbePolicy::Prepare(layout);
  reuses_ = !layout.reused.empty();
  plan_.Begin(layout, probes() ? 0 : dense_layers());
}

LayerPlan SplicePolicy::PlanLayer(int32_t layer) {
  if (!uses_classes(reuses_) || is_probing()) return SparseXProbePolicy::PlanLayer(layer);
  LayerPlan plan = plan_.Layer(layer);
  if (!question_.has_value()) return plan;
  LayerPlan open = SparseXProbePolicy::PlanLayer(layer);
  open.ffn = plan.ffn;
  return open;
}

PrefillStage SplicePolicy::InFrontOfQuestion(const ReuseLayout& layout, PrefillStage stage) {
  const bool last =
      stage.score.kind == ScoreKind::kNone && !stage.keys_only_last && stage.layers.end == config().num_layers;
  if (!last || options().policy == "splice+") return stage;
  const int32_t copies_end = layout.reused.back().end;
  const PositionRange question{copies_end < layout.num_tokens ? copies_end : Tail(layout).front().begin,
                               layout.num_tokens};
  const PositionRange front{0, question.begin};
  PositionRanges rows = IntersectionOf(stage.rows, {&front, 1});
  if (rows.empty()) return stage;
  question_ = stage;
  question_->rows = IntersectionOf(stage.rows, {&question, 1});
  stage.rows = std::move(rows);
  stage.final_before = question.begin;
  return stage;
}

PrefillStage SplicePolicy::FirstReuseStage(const ReuseLayout& layout) {
  return InFrontOfQuestion(layout, SparseXProbePolicy::FirstReuseStage(layout));
}

std::optional<PrefillStage> SplicePolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (question_.has_value()) return std::exchange(question_, std::nullopt);
  std::optional<PrefillStage> next = SparseXProbePolicy::NextStage(layout, selected);
  if (next.has_value()) next = InFrontOfQuestion(layout, *std::move(next));
  return next;
}

void SplicePolicy::RefineScore(const ReuseLayout& layout, int32_t num_layers, ScoreRequest& score) const {
  if (!options().score_all_heads) {
    for (int32_t i = 0; i < num_layers; ++i) score.kv_heads.push_back(plan_.GlobalHeads(score.layer + i));
  }
  if (options().policy != "splice+" || options().rec_frac < 0) return;
  const int64_t others = CountOf(RowsWithoutScores(layout));
  const auto wanted = static_cast<int64_t>(std::ceil(options().rec_frac * layout.num_tokens));
  // Those that are computed anyway may be among the best, too: with all of the prompt wanted all are taken.
  const int64_t reused = CountOf(layout.reused);
  score.k = wanted >= layout.num_tokens ? reused : std::clamp(wanted - others, score.k, std::max(reused, score.k));
}

}  // namespace spl::engine
