#include "services/engine/recovery/samkv.h"

#include <algorithm>
#include <numeric>

#include "services/engine/cache/segment_summary.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {
namespace {

// Of a longer question the last tokens choose: its scores cost their number times the documents.
constexpr int32_t kChoosingTokens = 64;

int32_t NumTiles(const PositionRange& document) { return (document.size() + kSamKvTileTokens - 1) / kSamKvTileTokens; }

}  // namespace

SamKvPolicy::SamKvPolicy(const ModelConfig& config, const ReuseOptions& options)
    : RecoveryPolicy(config),
      options_(options),
      shape_{config.num_layers, config.num_qo_heads, config.num_kv_heads, config.head_dim},
      choose_(ByOf(options)),
      recompute_(RecomputeOf(options)),
      sparsex_(config, SparseXOptions(options)),
      visibility_(static_cast<size_t>(config.num_kv_heads)) {}

ReuseOptions SamKvPolicy::SparseXOptions(ReuseOptions options) {
  constexpr double kRecomputeShare = 0.15;
  if (options.recompute_share == -1) options.recompute_share = kRecomputeShare;
  return options;
}

SamKvPolicy::By SamKvPolicy::ByOf(const ReuseOptions& options) {
  if (options.choose == "means") return By::kMeans;
  return options.choose == "attention" ? By::kAttention : By::kRecovered;
}

SamKvPolicy::Recompute SamKvPolicy::RecomputeOf(const ReuseOptions& options) {
  if (options.recompute == "none") return Recompute::kNone;
  if (options.recompute == "sparsex") return Recompute::kSparseX;
  if (options.recompute == "attended") return Recompute::kAttended;
  if (options.recompute.empty() && ByOf(options) == By::kRecovered) return Recompute::kNone;
  return Recompute::kAll;
}

int32_t SamKvPolicy::first_cached_layer() const {
  return choose_ == By::kRecovered ? sparsex_.first_cached_layer() : 0;
}

// What is written over is not read: of the copies only what the question is first asked over.
std::optional<std::vector<int32_t>> SamKvPolicy::TilesRead(int32_t num_tiles) const {
  if (choose_ != By::kMeans) return std::nullopt;
  if (recompute_ != Recompute::kAll || options_.fusion) return std::nullopt;
  std::vector<int32_t> fixed;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    if (tile < kSamKvInitialTiles || tile >= num_tiles - kSamKvLocalTiles) fixed.push_back(tile);
  }
  return fixed;
}

// What matters of a copy is computed afresh, and the rest is read roughly. Stored are the layers that recovery reads by
// default; one that reads more wants all of the KV.
std::optional<int32_t> SamKvPolicy::FirstQuantizedLayer(bool isolated) const {
  const int32_t stored = SparseXPolicy::DefaultDenseLayers(config(), isolated);
  const bool reads_more = options_.dense_layers >= 0 && options_.dense_layers < stored;
  if (choose_ != By::kRecovered || !options_.quantized_copies || reads_more) return std::nullopt;
  return stored;
}

LayerPlan SamKvPolicy::PlanLayer(int32_t layer) {
  if (sees_all_) return RecoveryPolicy::PlanLayer(layer);
  const std::vector<int32_t>& list = lists_[lists_.size() == 1 ? 0 : static_cast<size_t>(layer)];
  std::fill(visibility_.begin(), visibility_.end(),
            kernels::HeadVisibility{.rule = kernels::VisibilityRule::kList, .indices = list});
  return {.visibility = visibility_};
}

PositionRange SamKvPolicy::QuestionOf(const ReuseLayout& layout) {
  const PositionRange& last = layout.reused.back();
  if (last.end < layout.num_tokens) return {last.end, layout.num_tokens};
  return {std::max(last.begin, last.end - kSamKvTileTokens), last.end};
}

PositionRange SamKvPolicy::TilesOf(const PositionRange& document, int32_t begin, int32_t end) {
  return {std::min(document.end, document.begin + begin * kSamKvTileTokens),
          std::min(document.end, document.begin + end * kSamKvTileTokens)};
}

PositionRanges SamKvPolicy::AlwaysSeen(const ReuseLayout& layout) {
  return ComplementOf(layout.reused, {0, layout.num_tokens});
}

PositionRanges SamKvPolicy::FixedTiles(const ReuseLayout& layout) {
  PositionRanges fixed;
  for (const PositionRange& document : layout.reused) {
    fixed.push_back(TilesOf(document, 0, kSamKvInitialTiles));
    fixed.push_back(LocalTilesOf(document));
  }
  return MergeRanges(std::move(fixed));
}

void SamKvPolicy::See(const ReuseLayout& layout, std::span<const PositionRanges> visible) {
  lists_.clear();
  sees_all_ = true;
  for (const PositionRanges& ranges : visible) {
    std::vector<int32_t>& list = lists_.emplace_back();
    list.reserve(static_cast<size_t>(CountOf(ranges)));
    for (const PositionRange& range : ranges) {
      for (int32_t p = range.begin; p < range.end; ++p) list.push_back(p);
    }
    sees_all_ &= static_cast<int32_t>(list.size()) == layout.num_tokens;
  }
}

PositionRanges SamKvPolicy::AlwaysKept(const ReuseLayout& layout) const {
  if (choose_ == By::kMeans) return UnionOf(AlwaysSeen(layout), FixedTiles(layout));
  PositionRanges kept = AlwaysSeen(layout);
  if (num_initial() > 0) {
    for (const PositionRange& document : layout.reused) {
      const PositionRange initial = PageTiles(document).front();
      kept = UnionOf(kept, {&initial, 1});
    }
  }
  const PositionRange question = QuestionOf(layout);  // perhaps the last document's end
  return UnionOf(kept, {&question, 1});
}

PositionRanges SamKvPolicy::PageTiles(const PositionRange& document) {
  constexpr int32_t kTile = kSamKvTileTokens;
  PositionRanges tiles;
  int32_t begin = document.begin, end = (begin + kTile / 2 + kTile - 1) / kTile * kTile;
  for (; begin < document.end; begin = end, end += kTile) tiles.push_back({begin, std::min(end, document.end)});
  return tiles;
}

PositionRanges SamKvPolicy::Candidates(const ReuseLayout& layout) const {
  const int32_t question = QuestionOf(layout).begin;
  PositionRanges candidates;
  for (const PositionRange& document : layout.reused) {
    const int32_t begin = num_initial() == 0 ? document.begin : PageTiles(document).front().end;
    const PositionRange rest{begin, std::min(document.end, question)};
    if (rest.size() > 0) candidates.push_back(rest);
  }
  return candidates;
}

std::vector<std::vector<int32_t>> SamKvPolicy::TilesByAttention(const ReuseLayout& layout) const {
  std::vector<std::vector<float>> tiles;
  auto next = scores_.begin();
  const PositionRanges candidates = Candidates(layout);
  for (const PositionRange& document : layout.reused) {
    std::vector<float> tokens(static_cast<size_t>(document.size()));  // 0 for what is kept anyway
    for (const PositionRange& range : IntersectionOf(candidates, {&document, 1})) {
      std::copy_n(next, range.size(), tokens.begin() + (range.begin - document.begin));
      next += range.size();
    }
    std::vector<float>& of_document = tiles.emplace_back();
    for (const PositionRange& tile : PageTiles(document)) {
      const int32_t begin = tile.begin - document.begin, end = tile.end - document.begin;
      of_document.push_back(choose_ == By::kRecovered
                                ? TileWorth(tokens, begin, end)
                                : std::accumulate(tokens.begin() + begin, tokens.begin() + end, 0.0f));
    }
  }
  return BestTiles(tiles, BudgetRatio(layout), num_initial());
}

double SamKvPolicy::BudgetRatio(const ReuseLayout& layout) const {
  constexpr double kDefaultRatio = 0.15;
  constexpr int64_t kKeptTokens = 1024;  // docs/results/2026-11-23-short-prompts.md
  if (options_.budget_ratio != -1) return options_.budget_ratio;
  const int64_t tokens = CountOf(layout.reused);
  if (tokens <= kKeptTokens) return 1;
  return std::max(kDefaultRatio, double{kKeptTokens} / static_cast<double>(tokens));
}

bool SamKvPolicy::HasChoice(const ReuseLayout& layout) const {
  const double ratio = BudgetRatio(layout);
  if (ratio >= 1) return false;
  if (choose_ == By::kMeans) return MiddleBudget(Documents(layout), {.ratio = ratio}) > 0;
  std::vector<int32_t> tiles;
  for (const PositionRange& document : layout.reused) tiles.push_back(static_cast<int32_t>(PageTiles(document).size()));
  return BestTilesBudget(tiles, ratio, num_initial()) > 0 && !Candidates(layout).empty();
}

std::vector<SamKvDocument> SamKvPolicy::Documents(const ReuseLayout& layout) const {
  std::vector<SamKvDocument> documents;
  for (size_t i = 0; i < layout.reused.size(); ++i)
    documents.push_back({NumTiles(layout.reused[i]), summaries_[i].tile_means, summaries_[i].local_query});
  return documents;
}

PrefillStage SamKvPolicy::FirstReuseStage(const ReuseLayout& layout) {
  if (choose_ == By::kRecovered) return Recovery(layout, sparsex_.FirstStage(layout));
  if (HasChoice(layout)) return Composite(layout);
  const bool unknown = std::any_of(summaries_.begin(), summaries_.end(),
                                   [](const CopySummary& summary) { return summary.local_query.empty(); });
  if (recompute_ != Recompute::kAttended || !unknown) return Chosen(layout);
  PrefillStage stage = Composite(layout);  // of which only the fresh text's KV is wanted, see NextUnknown
  stage.query_means.clear();
  stage.score = {};
  return stage;
}

PrefillStage SamKvPolicy::Recovery(const ReuseLayout& layout, PrefillStage stage) {
  at_ = At::kRecovery;
  stage.kv_is_final = false;
  const bool last =
      stage.layers.end == config().num_layers && !stage.keys_only_last && stage.score.kind == ScoreKind::kNone;
  if (last && HasChoice(layout)) stage.score = QuestionScores(layout, stage.layers.begin);
  return stage;
}

ScoreRequest SamKvPolicy::QuestionScores(const ReuseLayout& layout, int32_t first_layer) const {
  const PositionRange question = QuestionOf(layout);
  return {.kind = ScoreKind::kColumnMass,
          .layer = first_layer,
          .candidates = Candidates(layout),
          .probes = {{std::max(question.begin, question.end - kChoosingTokens), question.end}},
          .all_layers = true,
          .give_scores = true};
}

bool SamKvPolicy::AsksDocuments(const ReuseLayout& layout) const {
  if (recompute_ == Recompute::kAttended) return true;
  return choose_ == By::kMeans && layout.reused.size() > 1;  // a single document has nobody to tell
}

// The next document without a local query over itself alone. Behind the composite stage, because attention reads whole
// pages, and fresh text that nobody has written yet may hold anything.
PrefillStage SamKvPolicy::NextUnknown(const ReuseLayout& layout) {
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
          .kv_is_final = false,
          .query_means = {local},
          .attention_to = {middle},
          .summary_of = static_cast<int32_t>(unknown_)};
}

PrefillStage SamKvPolicy::Composite(const ReuseLayout& layout) {
  at_ = At::kComposite;
  const PositionRange question = QuestionOf(layout);
  if (choose_ == By::kAttention) {
    const PositionRanges all = {{0, layout.num_tokens}};
    See(layout, {&all, 1});
    return {.rows = UnionOf(layout.fresh(), {&question, 1}),
            .layers = {0, config().num_layers},
            .kv_is_final = false,
            .score = QuestionScores(layout, 0)};
  }
  const PositionRanges visible = UnionOf(AlwaysSeen(layout), FixedTiles(layout));
  See(layout, {&visible, 1});
  return {.rows = UnionOf(layout.fresh(), {&question, 1}),
          .layers = {0, config().num_layers},
          .keys_only_last = true,
          .kv_is_final = false,
          .query_means = {question}};
}

void SamKvPolicy::Choose(const ReuseLayout& layout) {
  const auto num_layers = static_cast<size_t>(config().num_layers);
  const PositionRanges always = AlwaysKept(layout);
  kept_.assign(num_layers, always);
  const double ratio = BudgetRatio(layout);
  if (ratio >= 1) kept_.assign(num_layers, {{0, layout.num_tokens}});
  if (question_.empty() && scores_.empty()) return;
  std::vector<std::vector<std::vector<int32_t>>> tiles;  // [num_layers][num_documents], besides those
  if (choose_ != By::kMeans) {
    tiles.assign(num_layers, TilesByAttention(layout));
  } else {
    tiles =
        ChooseTiles(shape_, question_, Documents(layout), {.ratio = ratio, .personal = options_.personal_bias}).middle;
  }
  for (size_t layer = 0; layer < num_layers; ++layer) {
    PositionRanges middle;
    for (size_t i = 0; i < layout.reused.size(); ++i) {
      const bool by_pages = choose_ != By::kMeans;
      const PositionRanges pages = by_pages ? PageTiles(layout.reused[i]) : PositionRanges();
      for (const int32_t tile : tiles[layer][i])
        middle.push_back(by_pages ? pages[static_cast<size_t>(tile)] : TilesOf(layout.reused[i], tile, tile + 1));
    }
    kept_[layer] = UnionOf(always, middle);
  }
}

PositionRanges SamKvPolicy::KeptByAnyLayer() const {
  PositionRanges kept;
  for (const PositionRanges& of_layer : kept_) kept = UnionOf(kept, of_layer);
  return kept;
}

PositionRanges SamKvPolicy::KeptBeforeQuestion(const ReuseLayout& layout) const {
  const PositionRange before{layout.active().begin, QuestionOf(layout).begin};
  return IntersectionOf(KeptByAnyLayer(), {&before, 1});
}

PositionRanges SamKvPolicy::NotAttended(const ReuseLayout& layout) const {
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

// Which tokens are kept is known from here on.
PrefillStage SamKvPolicy::Chosen(const ReuseLayout& layout) {
  Choose(layout);
  if (recompute_ == Recompute::kAttended) copies_ = NotAttended(layout);
  PositionRanges only = KeptByAnyLayer();
  if (!options_.compact || CountOf(only) == layout.num_tokens) return BehindChoice(layout);
  // A shorter prompt keeps its first token, which every model attends to, though it may be a document's that is not
  // kept.
  const PositionRange first{0, 1};
  only = UnionOf(only, {&first, 1});
  const ReuseLayout left = layout.Only(only);
  kept_.assign(kept_.size(), {{0, left.num_tokens}});
  copies_ = NumberedWithin(copies_, only);
  compacted_ = true;
  PrefillStage stage = BehindChoice(left);
  stage.only = std::move(only);
  return stage;
}

PrefillStage SamKvPolicy::BehindChoice(const ReuseLayout& layout) {
  if (recompute_ == Recompute::kNone && choose_ == By::kRecovered) {
    at_ = At::kLastToken;
    return {.rows = {{layout.num_tokens - 1, layout.num_tokens}}, .layers = {0, config().num_layers}};
  }
  const PositionRanges rows = IntersectionOf(KeptBeforeQuestion(layout), ComplementOf(copies_, {0, layout.num_tokens}));
  if (recompute_ == Recompute::kNone || rows.empty()) return Question(layout);
  const PositionRanges seen = KeptByAnyLayer();
  See(layout, {&seen, 1});
  if (recompute_ == Recompute::kSparseX && sparsex_.DenseLayersOf(layout) < config().num_layers) return Dense(layout);
  at_ = At::kRecompute;
  PrefillStage stage{.rows = rows, .layers = {0, config().num_layers}, .kv_is_final = false};
  if (options_.fusion) stage.fuse = IntersectionOf(rows, MergeRanges(layout.reused));
  return stage;
}

// As SparseX, but for two things: the chosen rows begin at layer 0 again, for their hidden states have gaps, which are
// not kept; and with no dense layer the fresh text alone scores, in layer 0.
PrefillStage SamKvPolicy::Dense(const ReuseLayout& layout) {
  at_ = At::kDense;
  const PositionRange question = QuestionOf(layout);
  const PositionRanges probes = UnionOf(layout.fresh(), {&question, 1});
  const PositionRanges kept = KeptBeforeQuestion(layout);
  const int32_t dense = sparsex_.DenseLayersOf(layout);
  PrefillStage stage{
      .rows = dense == 0 ? probes : UnionOf(kept, probes), .layers = {0, std::max(1, dense)}, .kv_is_final = false};
  stage.score = {.kind = ScoreKind::kColumnMass,
                 .layer = stage.layers.end - 1,
                 .candidates = IntersectionOf(kept, MergeRanges(layout.reused)),
                 .probes = probes,
                 .pool_radius = options_.score_pool};
  stage.score.k = sparsex_.NumChosen(layout, CountOf(stage.score.candidates));
  if (stage.score.candidates.empty()) stage.score = {};
  return stage;
}

PrefillStage SamKvPolicy::ChosenRows(const ReuseLayout& layout, std::span<const int32_t> selected) {
  PositionRanges rows =
      IntersectionOf(UnionOf(sparsex_.RowsWithoutScores(layout), RangesOf(selected)), KeptBeforeQuestion(layout));
  at_ = At::kRecompute;
  if (rows.empty()) return Question(layout);
  return {.rows = std::move(rows), .layers = {0, config().num_layers}, .kv_is_final = false};
}

PrefillStage SamKvPolicy::Question(const ReuseLayout& layout) {
  const bool recomputed = at_ == At::kRecompute;
  at_ = At::kQuestion;
  See(layout, kept_);
  const PositionRange question = QuestionOf(layout);
  PositionRanges rows = {question};
  if (!recomputed) rows = UnionOf(layout.fresh(), rows);
  return {.rows = std::move(rows), .layers = {0, config().num_layers}};
}

std::optional<PrefillStage> SamKvPolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (layout.reused.empty()) return std::nullopt;
  switch (at_) {
    case At::kRecovery: {
      std::optional<PrefillStage> next = sparsex_.NextStage(layout, selected);
      return next.has_value() ? Recovery(layout, *std::move(next)) : Chosen(layout);
    }
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
    case At::kLastToken:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace spl::engine
