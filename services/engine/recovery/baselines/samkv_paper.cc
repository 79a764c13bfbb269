#include "services/engine/recovery/baselines/samkv_paper.h"

#include <algorithm>
#include <numeric>

#include "services/engine/cache/segment_summary.h"

namespace spl::engine {
namespace {

int32_t NumTiles(const PositionRange& document) { return (document.size() + kSamKvTileTokens - 1) / kSamKvTileTokens; }

// Tiles [begin, end) of a document as positions.
PositionRange TilesOf(const PositionRange& document, int32_t begin, int32_t end) {
  return {std::min(document.end, document.begin + begin * kSamKvTileTokens),
          std::min(document.end, document.begin + end * kSamKvTileTokens)};
}

PositionRanges FixedTiles(const ReuseLayout& layout) {
  PositionRanges fixed;
  for (const PositionRange& document : layout.reused) {
    fixed.push_back(TilesOf(document, 0, kSamKvInitialTiles));
    fixed.push_back(LocalTilesOf(document));
  }
  return MergeRanges(std::move(fixed));
}

}  // namespace

SamKvPaperPolicy::SamKvPaperPolicy(const ModelConfig& config, const ReuseOptions& options,
                                   const RecoveryProfile* profile)
    : SamKvPolicy(config, options, profile),
      shape_{config.num_layers, config.num_qo_heads, config.num_kv_heads, config.head_dim},
      choose_(ByOf(options)),
      recompute_(RecomputeOf(options)),
      visibility_(config.num_kv_heads) {}

SamKvPaperPolicy::By SamKvPaperPolicy::ByOf(const ReuseOptions& options) {
  if (options.choose == "means") return By::kMeans;
  return options.choose == "attention" ? By::kAttention : By::kRecovered;
}

SamKvPaperPolicy::Recompute SamKvPaperPolicy::RecomputeOf(const ReuseOptions& options) {
  if (options.recompute == "none") return Recompute::kNone;
  if (options.recompute == "sparsex") return Recompute::kSparseX;
  return options.recompute == "attended" ? Recompute::kAttended : Recompute::kAll;
}

int32_t SamKvPaperPolicy::first_cached_layer() const { return recovers() ? SamKvPolicy::first_cached_layer() : 0; }

std::optional<int32_t> SamKvPaperPolicy::FirstQuantizedLayer(bool isolated) const {
  return recovers() ? SamKvPolicy::FirstQuantizedLayer(isolated) : std::nullopt;
}

// What is written over is not read: of the copies only what the question is first asked over.
std::optional<std::vector<int32_t>> SamKvPaperPolicy::TilesRead(int32_t num_tiles) const {
  if (choose_ != By::kMeans) return std::nullopt;
  if (recompute_ != Recompute::kAll || options_.fusion) return std::nullopt;
  std::vector<int32_t> fixed;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    if (tile < kSamKvInitialTiles || tile >= num_tiles - kSamKvLocalTiles) fixed.push_back(tile);
  }
  return fixed;
}

LayerPlan SamKvPaperPolicy::PlanLayer(int32_t layer) {
  if (sees_all_) return RecoveryPolicy::PlanLayer(layer);
  const std::vector<int32_t>& list = lists_[lists_.size() == 1 ? 0 : static_cast<size_t>(layer)];
  std::fill(visibility_.begin(), visibility_.end(),
            kernels::HeadVisibility{.rule = kernels::VisibilityRule::kList, .indices = list});
  return {.visibility = visibility_};
}

void SamKvPaperPolicy::See(const ReuseLayout& layout, std::span<const PositionRanges> visible) {
  lists_.clear();
  sees_all_ = true;
  for (const PositionRanges& ranges : visible) {
    std::vector<int32_t>& list = lists_.emplace_back();
    list.reserve(CountOf(ranges));
    for (const PositionRange& range : ranges) {
      for (int32_t p = range.begin; p < range.end; ++p) list.push_back(p);
    }
    sees_all_ &= static_cast<int32_t>(list.size()) == layout.num_tokens;
  }
}

PositionRanges SamKvPaperPolicy::AlwaysKept(const ReuseLayout& layout) const {
  return choose_ == By::kMeans ? UnionOf(AlwaysSeen(layout), FixedTiles(layout)) : SamKvPolicy::AlwaysKept(layout);
}

float SamKvPaperPolicy::TileScore(std::span<const float> tokens, int32_t begin, int32_t end) const {
  return recovers() ? SamKvPolicy::TileScore(tokens, begin, end)
                    : std::accumulate(tokens.begin() + begin, tokens.begin() + end, 0.0f);
}

bool SamKvPaperPolicy::HasChoice(const ReuseLayout& layout) const {
  if (choose_ != By::kMeans) return SamKvPolicy::HasChoice(layout);
  const double ratio = BudgetRatio(layout);
  return ratio < 1 && MiddleBudget(Documents(layout), {.ratio = ratio}) > 0;
}

std::vector<SamKvDocument> SamKvPaperPolicy::Documents(const ReuseLayout& layout) const {
  std::vector<SamKvDocument> documents;
  for (size_t i = 0; i < layout.reused.size(); ++i)
    documents.push_back({NumTiles(layout.reused[i]), summaries_[i].tile_means, summaries_[i].local_query});
  return documents;
}

PrefillStage SamKvPaperPolicy::FirstReuseStage(const ReuseLayout& layout) {
  if (recovers()) {
    at_ = At::kRecovery;
    return SamKvPolicy::FirstReuseStage(layout);
  }
  if (HasChoice(layout)) return Composite(layout);
  const bool unknown = std::any_of(summaries_.begin(), summaries_.end(),
                                   [](const CopySummary& summary) { return summary.local_query.empty(); });
  if (recompute_ != Recompute::kAttended || !unknown) return Chosen(layout);
  PrefillStage stage = Composite(layout);  // of which only the fresh text's KV is wanted, see NextUnknown
  stage.query_means.clear();
  stage.score = {};
  return stage;
}

bool SamKvPaperPolicy::AsksDocuments(const ReuseLayout& layout) const {
  if (recompute_ == Recompute::kAttended) return true;
  return choose_ == By::kMeans && layout.reused.size() > 1;  // a single document has nobody to tell
}

// The next document without a local query over itself alone. Behind the composite stage, because attention reads whole
// pages, and fresh text that nobody has written yet may hold anything.
PrefillStage SamKvPaperPolicy::NextUnknown(const ReuseLayout& layout) {
  const bool asked = AsksDocuments(layout);
  while (asked && unknown_ < summaries_.size() && !summaries_[unknown_].local_query.empty()) ++unknown_;
  if (!asked || unknown_ == summaries_.size()) return Chosen(layout);
  at_ = At::kLocal;
  const PositionRange& document = layout.reused[unknown_];
  const PositionRange local = LocalTilesOf(document), middle = MiddleTilesOf(document);
  const PositionRanges alone = {document};
  See(layout, {&alone, 1});
  return {.rows = {local},
          .layers = {0, config().num_layers},
          .keys_only_last = middle.size() == 0,  // the last layer's attention counts, too
          .final_before = 0,
          .query_means = {local},
          .attention_to = {middle},
          .summary_of = static_cast<int32_t>(unknown_)};
}

PrefillStage SamKvPaperPolicy::Composite(const ReuseLayout& layout) {
  at_ = At::kComposite;
  const PositionRange question = QuestionOf(layout);
  if (choose_ == By::kAttention) {
    const PositionRanges all = {{0, layout.num_tokens}};
    See(layout, {&all, 1});
    return {.rows = UnionOf(layout.fresh(), {&question, 1}),
            .layers = {0, config().num_layers},
            .final_before = 0,
            .score = QuestionScores(layout, 0)};
  }
  const PositionRanges visible = UnionOf(AlwaysSeen(layout), FixedTiles(layout));
  See(layout, {&visible, 1});
  return {.rows = UnionOf(layout.fresh(), {&question, 1}),
          .layers = {0, config().num_layers},
          .keys_only_last = true,
          .final_before = 0,
          .query_means = {question}};
}

void SamKvPaperPolicy::Choose(const ReuseLayout& layout) {
  SamKvPolicy::Choose(layout);
  if (recompute_ == Recompute::kAttended) copies_ = NotAttended(layout);
  if (question_.empty()) return;
  const auto tiles = ChooseTiles(shape_, question_, Documents(layout),
                                 {.ratio = BudgetRatio(layout), .personal = options_.personal_bias})
                         .middle;  // [num_layers][num_documents], besides the fixed ones
  for (size_t layer = 0; layer < kept_.size(); ++layer) {
    PositionRanges middle;
    for (size_t i = 0; i < layout.reused.size(); ++i) {
      for (const int32_t tile : tiles[layer][i]) middle.push_back(TilesOf(layout.reused[i], tile, tile + 1));
    }
    kept_[layer] = UnionOf(kept_[layer], middle);
  }
}

PositionRanges SamKvPaperPolicy::KeptBeforeQuestion(const ReuseLayout& layout) const {
  const PositionRange before{layout.active().begin, QuestionOf(layout).begin};
  return IntersectionOf(KeptByAnyLayer(), {&before, 1});
}

PositionRanges SamKvPaperPolicy::NotAttended(const ReuseLayout& layout) const {
  PositionRanges rest;
  for (size_t i = 0; i < layout.reused.size(); ++i) {
    const PositionRange& document = layout.reused[i];
    PositionRanges attended = RangesOf(summaries_[i].attended);
    for (PositionRange& range : attended) range = {document.begin + range.begin, document.begin + range.end};
    const PositionRanges of_document = ComplementOf(attended, MiddleTilesOf(document));
    rest.insert(rest.end(), of_document.begin(), of_document.end());
  }
  return rest;
}

PrefillStage SamKvPaperPolicy::BehindChoice(const ReuseLayout& layout, const PositionRanges& only) {
  if (!only.empty()) copies_ = NumberedWithin(copies_, only);
  const PositionRanges rows = IntersectionOf(KeptBeforeQuestion(layout), ComplementOf(copies_, {0, layout.num_tokens}));
  if (recompute_ == Recompute::kNone || rows.empty()) return Question(layout);
  const PositionRanges seen = KeptByAnyLayer();
  See(layout, {&seen, 1});
  if (recompute_ == Recompute::kSparseX && sparsex_.DenseLayersOf(layout) < config().num_layers) return Dense(layout);
  at_ = At::kRecompute;
  PrefillStage stage{.rows = rows, .layers = {0, config().num_layers}, .final_before = 0};
  if (options_.fusion) stage.fuse = IntersectionOf(rows, MergeRanges(layout.reused));
  return stage;
}

// As SparseX, but for two things: the chosen rows begin at layer 0 again, for their hidden states have gaps, which are
// not kept; and with no dense layer the fresh text alone scores, in layer 0.
PrefillStage SamKvPaperPolicy::Dense(const ReuseLayout& layout) {
  at_ = At::kDense;
  const PositionRange question = QuestionOf(layout);
  const PositionRanges probes = UnionOf(layout.fresh(), {&question, 1});
  const PositionRanges kept = KeptBeforeQuestion(layout);
  const int32_t dense = sparsex_.DenseLayersOf(layout);
  PrefillStage stage{
      .rows = dense == 0 ? probes : UnionOf(kept, probes), .layers = {0, std::max(1, dense)}, .final_before = 0};
  stage.score = {.kind = ScoreKind::kColumnMass,
                 .layer = stage.layers.end - 1,
                 .candidates = IntersectionOf(kept, MergeRanges(layout.reused)),
                 .probes = probes,
                 .pool_radius = options_.score_pool};
  stage.score.k = sparsex_.NumChosen(layout, CountOf(stage.score.candidates));
  if (stage.score.candidates.empty()) stage.score = {};
  return stage;
}

PrefillStage SamKvPaperPolicy::ChosenRows(const ReuseLayout& layout, std::span<const int32_t> selected) {
  PositionRanges rows =
      IntersectionOf(UnionOf(sparsex_.RowsWithoutScores(layout), RangesOf(selected)), KeptBeforeQuestion(layout));
  at_ = At::kRecompute;
  if (rows.empty()) return Question(layout);
  return {.rows = std::move(rows), .layers = {0, config().num_layers}, .final_before = 0};
}

PrefillStage SamKvPaperPolicy::Question(const ReuseLayout& layout) {
  const bool recomputed = at_ == At::kRecompute;
  at_ = At::kQuestion;
  See(layout, kept_);
  const PositionRange question = QuestionOf(layout);
  PositionRanges rows = {question};
  if (!recomputed) rows = UnionOf(layout.fresh(), rows);
  return {.rows = std::move(rows), .layers = {0, config().num_layers}};
}

std::optional<PrefillStage> SamKvPaperPolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (layout.reused.empty()) return std::nullopt;
  switch (at_) {
    case At::kRecovery:
      return SamKvPolicy::NextStage(layout, selected);
    case At::kDense:
      return ChosenRows(layout, selected);
    case At::kLocal:
      summaries_[unknown_].local_query = std::move(means_);
      summaries_[unknown_].attended = std::move(attended_[0]);
      for (int32_t& position : summaries_[unknown_].attended) position -= layout.reused[unknown_].begin;
      return NextUnknown(layout);
    case At::kComposite:
      question_ = std::move(means_);
      return NextUnknown(layout);
    case At::kRecompute:
      return Question(layout);
    case At::kQuestion:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace spl::engine
