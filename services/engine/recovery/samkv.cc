#include "services/engine/recovery/samkv.h"

#include <algorithm>
#include <numeric>

namespace spl::engine {
namespace {

// Of a longer question the last tokens choose: its scores cost their number times the documents.
constexpr int32_t kChoosingTokens = 64;

}  // namespace

// The tokens of a copy that matter are computed afresh, and the rest is read roughly. Stored are the layers above the
// dense ones, which take the probe's place where such copies are read; a request that asks for more layers wants all of
// the KV.
std::optional<int32_t> SamKvPolicy::FirstQuantizedLayer(bool isolated) const {
  const int32_t stored = SparseXPolicy::DefaultDenseLayers(config(), isolated);
  const bool reads_more = options_.probe_layers > 0 || (options_.dense_layers >= 0 && options_.dense_layers < stored);
  if (!options_.quantized_copies || reads_more) return std::nullopt;
  return stored;
}

PositionRange SamKvPolicy::QuestionOf(const ReuseLayout& layout) {
  if (layout.reused.empty()) return layout.active();
  const PositionRange& last = layout.reused.back();
  if (last.end < layout.num_tokens) return {last.end, layout.num_tokens};
  return {std::max(last.begin, last.end - kSamKvTileTokens), last.end};
}

PositionRanges SamKvPolicy::AlwaysSeen(const ReuseLayout& layout) {
  return ComplementOf(layout.reused, {0, layout.num_tokens});
}

PositionRanges SamKvPolicy::AlwaysKept(const ReuseLayout& layout) const {
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

float SamKvPolicy::TileScore(std::span<const float> tokens, int32_t begin, int32_t end) const {
  return TileWorth(tokens, begin, end);
}

std::vector<std::vector<int32_t>> SamKvPolicy::TilesByAttention(const ReuseLayout& layout) const {
  std::vector<std::vector<float>> tiles;
  auto next = scores_.begin();
  const PositionRanges candidates = Candidates(layout);
  for (const PositionRange& document : layout.reused) {
    std::vector<float> tokens(document.size());  // 0 for what is kept anyway
    for (const PositionRange& range : IntersectionOf(candidates, {&document, 1})) {
      std::copy_n(next, range.size(), tokens.begin() + (range.begin - document.begin));
      next += range.size();
    }
    std::vector<float>& of_document = tiles.emplace_back();
    for (const PositionRange& tile : PageTiles(document)) {
      of_document.push_back(TileScore(tokens, tile.begin - document.begin, tile.end - document.begin));
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
  std::vector<int32_t> tiles;
  for (const PositionRange& document : layout.reused) tiles.push_back(static_cast<int32_t>(PageTiles(document).size()));
  return BestTilesBudget(tiles, ratio, num_initial()) > 0 && !Candidates(layout).empty();
}

PrefillStage SamKvPolicy::FirstReuseStage(const ReuseLayout& layout) {
  return Recovery(layout, sparsex_.FirstStage(layout));
}

PrefillStage SamKvPolicy::Recovery(const ReuseLayout& layout, PrefillStage stage) {
  stage.final_before = 0;
  const bool last =
      stage.layers.end == config().num_layers && !stage.keys_only_last && stage.score.kind == ScoreKind::kNone;
  if (last && HasChoice(layout)) {
    const int32_t dense = sparsex_.DenseLayersOf(layout);
    stage.score = QuestionScores(layout, dense < config().num_layers ? std::max(0, dense - 1) : 0);
    // A prompt that ends with a copy that is not recovered.
    if (stage.layers.begin == 0) stage.rows = UnionOf(stage.rows, stage.score.probes);
  }
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

void SamKvPolicy::Choose(const ReuseLayout& layout) {
  PositionRanges kept = AlwaysKept(layout);
  if (BudgetRatio(layout) >= 1) kept = {{0, layout.num_tokens}};
  if (!scores_.empty()) {
    const std::vector<std::vector<int32_t>> tiles = TilesByAttention(layout);
    PositionRanges chosen;
    for (size_t i = 0; i < layout.reused.size(); ++i) {
      const PositionRanges pages = PageTiles(layout.reused[i]);
      for (const int32_t tile : tiles[i]) chosen.push_back(pages[tile]);
    }
    kept = UnionOf(kept, chosen);
  }
  kept_.assign(static_cast<size_t>(config().num_layers), kept);
}

PositionRanges SamKvPolicy::KeptByAnyLayer() const {
  PositionRanges kept;
  for (const PositionRanges& of_layer : kept_) kept = UnionOf(kept, of_layer);
  return kept;
}

PrefillStage SamKvPolicy::Chosen(const ReuseLayout& layout) {
  Choose(layout);
  PositionRanges only = KeptByAnyLayer();
  if (!options_.compact || CountOf(only) == layout.num_tokens) return BehindChoice(layout, {});
  // A shorter prompt keeps its first token, which every model attends to, though it may be a document's that is not
  // kept.
  const PositionRange first{0, 1};
  only = UnionOf(only, {&first, 1});
  const ReuseLayout left = layout.Only(only);
  kept_.assign(kept_.size(), {{0, left.num_tokens}});
  compacted_ = true;
  PrefillStage stage = BehindChoice(left, only);
  stage.only = std::move(only);
  return stage;
}

PrefillStage SamKvPolicy::BehindChoice(const ReuseLayout& layout, const PositionRanges& /*only*/) {
  last_ = true;
  return {.rows = {{layout.num_tokens - 1, layout.num_tokens}}, .layers = {0, config().num_layers}};
}

std::optional<PrefillStage> SamKvPolicy::NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) {
  if (layout.reused.empty() || last_) return std::nullopt;
  std::optional<PrefillStage> next = sparsex_.NextStage(layout, selected);
  return next.has_value() ? Recovery(layout, *std::move(next)) : Chosen(layout);
}

}  // namespace spl::engine
