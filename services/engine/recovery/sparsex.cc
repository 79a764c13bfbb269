#include "services/engine/recovery/sparsex.h"

#include <algorithm>
#include <cmath>

#include "services/base/check.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {
namespace {

constexpr int32_t kLinkTokensIsolated = 8;
constexpr int32_t kRecomputeMin = 64;
constexpr int64_t kSmallModelWeights = 20'000'000'000;

// Weights of the linear layers, roughly: enough to tell a small model from a large one.
int64_t NumWeights(const ModelConfig& c) {
  const int64_t attention = int64_t{c.hidden_size} * (2 * c.q_size() + 2 * c.kv_size());
  return c.num_layers * (attention + int64_t{3} * c.hidden_size * c.intermediate_size);
}

bool IsSame(CopyContext context) { return context == CopyContext::kSame; }

// Copies behind other text need what copies that were computed alone need: both lack the context that they have here
// (docs/results/2026-11-24-foreign-contexts.md).
bool HasOtherContext(const ReuseLayout& layout) {
  return !std::all_of(layout.contexts.begin(), layout.contexts.end(), IsSame);
}

// Whether the request says itself how much is recomputed.
bool SetsRows(const ReuseOptions& options) {
  return options.dense_layers >= 0 || options.recompute_share != -1 || options.recompute_min != -1 ||
         options.link_tokens >= 0 || options.rec_frac >= 0;
}

}  // namespace

int32_t SparseXPolicy::DefaultDenseLayers(const ModelConfig& config, bool isolated) {
  const bool small = config.moe.num_experts == 0 && NumWeights(config) < kSmallModelWeights;
  const double share = (isolated ? 2.0 : 1.0) / (small ? 6.0 : 8.0);
  return std::max(1, static_cast<int32_t>(std::lround(config.num_layers * share)));
}

SparseXPolicy::SparseXPolicy(const ModelConfig& config, const ReuseOptions& options, Amount amount)
    : RecoveryPolicy(config), options_(options), amount_(amount) {}

void SparseXPolicy::Prepare(const ReuseLayout& layout) {
  dense_layers_ = DenseLayersOf(layout);
  // Copies that are left as they are have no rows in the dense layers.
  first_cached_layer_ = CountOf(Recovered(layout)) == CountOf(layout.reused) ? dense_layers_ : 0;
}

PositionRanges SparseXPolicy::Recovered(const ReuseLayout& layout) const {
  if (SetsRows(options_)) return layout.reused;
  PositionRanges recovered;
  for (size_t i = 0; i < layout.reused.size(); ++i) {
    if (!IsSame(layout.contexts[i])) recovered.push_back(layout.reused[i]);
  }
  return recovered;
}

// The share for copies from another context, which have more dense layers: nobody knows the context before it is
// fetched.
double SparseXPolicy::SavedByCopy() const {
  const int32_t layers = config().num_layers;
  const int32_t dense =
      options_.dense_layers >= 0 ? std::min(layers, options_.dense_layers) : DefaultDenseLayers(config(), true);
  const double share = options_.recompute_share != -1 ? options_.recompute_share : amount_.share;
  return (1 - share) * (layers - dense) / layers;
}

int32_t SparseXPolicy::DenseLayersOf(const ReuseLayout& layout) const {
  return std::min(config().num_layers, options_.dense_layers >= 0
                                           ? options_.dense_layers
                                           : DefaultDenseLayers(config(), HasOtherContext(layout)));
}

PrefillStage SparseXPolicy::FirstReuseStage(const ReuseLayout& layout) {
  const PositionRanges recovered = Recovered(layout);
  const PositionRange last{layout.num_tokens - 1, layout.num_tokens};  // its logits give the first token
  if (recovered.empty()) return {.rows = UnionOf(layout.fresh(), {&last, 1}), .layers = {0, config().num_layers}};
  runs_dense_ = dense_layers_ > 0;
  if (dense_layers_ >= config().num_layers) return AllRows(layout);
  if (dense_layers_ == 0) {
    // K of layer 0 depends on the token and its position alone, so the copies score as well as fresh keys would.
    next_ = Next::kChosen;
    return Probes(layout);
  }
  next_ = Next::kProbes;
  // The hidden states in front of layer 0 are the embeddings, which need no keeping.
  // The rows of later stages are among these.
  PositionRanges rows = UnionOf(UnionOf(layout.fresh(), recovered), Tail(layout));
  return {.rows = UnionOf(rows, {&last, 1}),
          .layers = {0, dense_layers_},
          .keep_hidden = dense_layers_ > 1,
          .keys_only_last = true};
}

int64_t SparseXPolicy::CostOf(const ReuseLayout& layout) const {
  const PositionRanges recovered = Recovered(layout), fresh = layout.fresh();
  const int64_t dense = CountOf(UnionOf(fresh, recovered));
  const int64_t chosen = CountOf(RowsWithoutScores(layout)) + Scores(layout, 0, 1, amount_).k;
  return dense * dense_layers_ + chosen * (config().num_layers - dense_layers_);
}

int64_t SparseXPolicy::NumChosen(const ReuseLayout& layout, int64_t num_reused, Amount amount) const {
  const auto reused = static_cast<double>(num_reused);
  const double share = options_.recompute_share != -1 ? options_.recompute_share : amount.share;
  const auto wanted = static_cast<int64_t>(std::lround(share * reused));
  const auto allowed = static_cast<int64_t>(options_.max_recompute_fraction * reused);
  const int32_t fewest =
      options_.recompute_min != -1
          ? options_.recompute_min
          : std::min(HasOtherContext(layout) ? amount.fewest_apart : kRecomputeMin, options_.recompute_max);
  return std::min({num_reused, allowed, std::clamp<int64_t>(wanted, fewest, options_.recompute_max)});
}

PrefillStage SparseXPolicy::Probes(const ReuseLayout& layout) const {
  const int32_t layer = std::max(0, dense_layers_ - 1);
  return {.rows = ProbeRows(layout),
          .layers = {layer, layer + 1},
          .final_before = 0,
          .score = Scores(layout, layer, 1, amount_)};
}

ScoreRequest SparseXPolicy::Scores(const ReuseLayout& layout, int32_t layer, int32_t num_layers, Amount amount) const {
  ScoreRequest score{.kind = ScoreKind::kColumnMass,
                     .layer = layer,
                     .candidates = Recovered(layout),
                     .probes = ProbeRows(layout),
                     .pool_radius = options_.score_pool,
                     .all_layers = num_layers > 1};
  score.k = NumChosen(layout, CountOf(score.candidates), amount);
  RefineScore(layout, num_layers, score);
  return score;
}

std::optional<PrefillStage> SparseXPolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (next_ == Next::kProbes) {
    next_ = Next::kChosen;
    return Probes(layout);
  }
  if (next_ == Next::kNothing) return std::nullopt;
  next_ = Next::kNothing;
  return PrefillStage{.rows = UnionOf(RowsWithoutScores(layout), RangesOf(selected)),
                      .layers = {std::max(0, dense_layers_ - 1), config().num_layers}};
}

PositionRanges SparseXPolicy::RowsWithoutScores(const ReuseLayout& layout) const {
  PositionRanges rows = layout.fresh();
  for (const PositionRanges& more : {Overflow(layout), Tail(layout), Links(layout)})
    rows.insert(rows.end(), more.begin(), more.end());
  rows.push_back({layout.num_tokens - 1, layout.num_tokens});
  return MergeRanges(std::move(rows));
}

PositionRanges SparseXPolicy::RowsOfAllStages(const ReuseLayout& layout) const {
  const PositionRanges recovered = Recovered(layout);
  const bool all = !recovered.empty() && dense_layers_ >= config().num_layers;
  if (layout.reused.empty() || all) return {layout.active()};
  return UnionOf(RowsWithoutScores(layout), recovered);  // probe rows are fresh text and the tail
}

EdgeRows SparseXPolicy::Edges(const ReuseLayout& layout) const {
  PositionRanges tail = Tail(layout);
  tail.push_back({layout.num_tokens - 1, layout.num_tokens});
  return {.links = Links(layout), .beside_new = Overflow(layout), .tail = MergeRanges(std::move(tail))};
}

double SparseXPolicy::PredictedRows(const ReuseLayout& layout) {
  Prepare(layout);
  const auto fresh = static_cast<double>(CountOf(layout.fresh()));
  if (layout.reused.empty() || Recovered(layout).empty()) return fresh + 1;  // and the last position
  return static_cast<double>(CostOf(layout)) / config().num_layers;
}

PositionRanges SparseXPolicy::ProbeRows(const ReuseLayout& layout) const {
  return UnionOf(layout.fresh(), Tail(layout));
}

PositionRanges SparseXPolicy::Tail(const ReuseLayout& layout) const {
  SPLICE_CHECK(!layout.reused.empty(), "a prompt without copies has no tail");
  const PositionRange& last = layout.reused.back();
  if (last.end < layout.num_tokens) return {};
  return MergeRanges({{std::max(last.begin, last.end - options_.tail_tokens), last.end}});
}

PositionRanges SparseXPolicy::Overflow(const ReuseLayout& layout) const {
  PositionRanges sides;
  for (const PositionRange& fresh : layout.fresh()) {
    sides.push_back({std::max(layout.num_prefix, fresh.begin - options_.overflow_tokens), fresh.begin});
    sides.push_back({fresh.end, std::min(layout.num_tokens, fresh.end + options_.overflow_tokens)});
  }
  return IntersectionOf(MergeRanges(std::move(sides)), MergeRanges(Recovered(layout)));
}

PositionRanges SparseXPolicy::Links(const ReuseLayout& layout) const {
  PositionRanges links;
  for (size_t i = 0; i < layout.reused.size(); ++i) {
    const PositionRange& range = layout.reused[i];
    const int32_t count = options_.link_tokens >= 0    ? options_.link_tokens
                          : IsSame(layout.contexts[i]) ? 0
                                                       : kLinkTokensIsolated;
    links.push_back({range.begin, std::min(range.end, range.begin + count)});
  }
  return MergeRanges(std::move(links));
}

}  // namespace spl::engine
