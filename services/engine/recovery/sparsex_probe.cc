#include "services/engine/recovery/sparsex_probe.h"

#include <algorithm>
#include <utility>

namespace spl::engine {
namespace {

int32_t ProbeLayers(const ModelConfig& config, const ReuseOptions& options, const RecoveryProfile* profile) {
  if (options.probe_layers > 0) return options.probe_layers;
  return profile != nullptr ? profile->probe_layers : config.num_layers;
}

int32_t ScoreLayers(const ReuseOptions& options, const RecoveryProfile* profile, int32_t probe_layers) {
  if (options.score_layers > 0) return std::min(options.score_layers, probe_layers);
  return profile != nullptr && options.probe_layers < 0 ? profile->score_layers : (probe_layers + 1) / 2;
}

}  // namespace

SparseXProbePolicy::SparseXProbePolicy(const ModelConfig& config, const ReuseOptions& options,
                                       const RecoveryProfile* profile, double least_share)
    : SparseXPolicy(config, options,
                    {std::max(kBehindDenseLayers.share, least_share), kBehindDenseLayers.fewest_apart}),
      chosen_{std::max(profile != nullptr ? profile->recompute_share : kBehindProbe.share, least_share),
              kBehindProbe.fewest_apart},
      end_(ProbeLayers(config, options, profile)),
      scoring_(ScoreLayers(options, profile, end_)) {}

ScoreRequest SparseXProbePolicy::ProbeScores(const ReuseLayout& layout) const {
  ScoreRequest score = Scores(layout, end_ - scoring_, scoring_, chosen_);
  score.probes = IntersectionOf(score.probes, ComplementOf(Unseen(layout), {0, layout.num_tokens}));
  return score;
}

// Windows are counted in positions: over a text that lacks pages they would reach too far.
PositionRanges SparseXProbePolicy::Unseen(const ReuseLayout& layout) const {
  const int32_t tokens = options().probe_tokens < 0 ? kProbeTokens : options().probe_tokens;
  if (tokens == 0 || !config().sliding_windows.empty()) return {};
  const PositionRanges fresh = layout.fresh();
  int64_t in_front = CountOf(fresh) - tokens;
  PositionRanges unseen;
  for (const PositionRange& range : fresh) {
    if (in_front <= 0) break;
    const int32_t end = range.begin + static_cast<int32_t>(std::min<int64_t>(range.size(), in_front));
    in_front -= range.size();
    constexpr int32_t kPage = kernels::kPageTokens;
    // Attention rests on a text's first tokens: a prompt without them would be read in another way.
    const PositionRange pages{std::max(kPage, (range.begin + kPage - 1) / kPage * kPage), end / kPage * kPage};
    if (pages.size() > 0) unseen.push_back(pages);
  }
  return unseen;
}

double SparseXProbePolicy::CostOf(const ReuseLayout& layout) const {
  const ScoreRequest score = ProbeScores(layout);
  const int64_t rows =
      CountOf(score.probes) * end_ + (CountOf(RowsWithoutScores(layout)) + score.k) * config().num_layers;
  return kProbeRowCost * static_cast<double>(rows);
}

double SparseXProbePolicy::PredictedRows(const ReuseLayout& layout) {
  const double rows = SparseXPolicy::PredictedRows(layout);
  return !probes_ || Recovered(layout).empty() ? rows : CostOf(layout) / config().num_layers;
}

void SparseXProbePolicy::Prepare(const ReuseLayout& layout) {
  SparseXPolicy::Prepare(layout);
  if (layout.reused.empty()) return;  // nothing is recovered either way
  if (options().probe_layers == 0 || options().dense_layers >= 0 || !layout.copies_are_whole) return;
  probes_ = options().probe_layers > 0 || CostOf(layout) < static_cast<double>(SparseXPolicy::CostOf(layout));
}

PrefillStage SparseXProbePolicy::FirstReuseStage(const ReuseLayout& layout) {
  if (!probes_ || Recovered(layout).empty()) return SparseXPolicy::FirstReuseStage(layout);
  probed_ = chooses_ = true;
  ScoreRequest score = ProbeScores(layout);
  return {.rows = score.probes,
          .layers = {0, end_},
          .final_before = 0,
          .unseen = Unseen(layout),
          .score = std::move(score)};
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
