// Policy `samkv`: of many documents only the tiles that the question needs are kept, layer by layer (SamKV;
// docs/methods/samkv.md). A document is one copied run.
//
// choose=recovered, ours, the default: the stages of SparseX (sparsex.h) over everything. In the last of them the
// attention that the question's last tokens pay to the documents is summed over its layers and all heads
// (kernels/selection/sparsex/column_scores.h): where one fact leads to another, the copies have learnt of each other by
// then, and attention points at both. Tiles are kept by what they are worth (TileWorth). A last stage is the prompt's
// last token over everything, and makes what is kept final.
//
// The others choose first, and what is kept is computed afresh with all of it in sight. Stages, each from layer 0 on:
// choose=means, the paper's:
//  1. fresh text over initial and local tiles: gives the question's mean query of every layer;
//  2. for each document whose local query nobody has computed yet: its last two tiles over the document alone. By both
//     the tiles are chosen (samkv_choice.h); left out where there is nothing to choose.
// choose=attention, in their place: fresh text over everything, and the attention that the question's last tokens pay
// to the documents in all layers and heads (kernels/selection/sparsex/column_scores.h).
// With recompute=attended stage 2 runs for each document whose attended tokens nobody has found out, behind both, and
// also where there is nothing to choose.
// Then
//  3. recompute=samkv: kept tokens of all layers together and the fresh text in front of the question, each seeing what
//     stands before it of these (rules 1 and 2 for the union over the layers). recompute=attended: of the kept tokens
//     those of initial and local tiles and those to which their document by itself attends most
//     (SegmentSummary::attended, 3.3); the others stay copies. recompute=sparsex: of the kept tokens the rows that
//     SparseX would compute: all in its dense layers, where the question scores them, then the chosen ones;
//  4. the question, which in each layer sees what that layer keeps. With recompute=none all fresh text.
//
// Text that is in no document (fresh text, the exact prefix) is always seen. Positions keep their gaps; with `compact`
// what any layer keeps moves together behind the choice, keys turned, and steps 3 and 4 are those of a shorter prompt
// of which every layer keeps everything. With budget_ratio 1 nothing is left out: choose=recovered is SparseX then, and
// recompute=samkv a full prefill. Behind a prompt without a copy KV is exact.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/recovery/samkv_choice.h"
#include "services/engine/recovery/sparsex.h"

namespace spl::engine {

class SamKvPolicy final : public RecoveryPolicy {
 public:
  SamKvPolicy(const ModelConfig& config, const ReuseOptions& options);
  std::string_view name() const override { return "samkv"; }
  bool reuses_segments() const override { return true; }
  // What only recovers before it chooses sees all there is.
  bool runs_alone(const ReuseLayout& layout) const override {
    return !layout.reused.empty() && (choose_ != By::kRecovered || recompute_ != Recompute::kNone);
  }
  int32_t first_cached_layer() const override;
  int32_t max_segments() const override { return kSamKvMaxDocuments; }
  bool wants_summaries() const override { return wants_tile_means() || wants_local_queries(); }
  bool wants_tile_means() const override { return choose_ == By::kMeans; }
  bool wants_local_queries() const override { return choose_ == By::kMeans || recompute_ == Recompute::kAttended; }
  std::optional<std::vector<int32_t>> TilesRead(int32_t num_tiles) const override;
  std::optional<int32_t> FirstQuantizedLayer(bool isolated) const override;
  void SetSummaries(std::vector<CopySummary> summaries) override { summaries_ = std::move(summaries); }
  void TakeQueryMeans(std::vector<float> means) override { means_ = std::move(means); }
  void TakeAttended(std::vector<std::vector<int32_t>> positions) override { attended_ = std::move(positions); }
  void TakeScores(std::vector<float> scores) override { scores_ = std::move(scores); }
  LayerPlan PlanLayer(int32_t layer) override;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;
  std::span<const PositionRanges> kept() const override {
    return compacted_ ? std::span<const PositionRanges>() : kept_;
  }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;

 private:
  enum class By : uint8_t { kRecovered, kAttention, kMeans };           // ReuseOptions::choose
  enum class Recompute : uint8_t { kNone, kSparseX, kAttended, kAll };  // ReuseOptions::recompute
  enum class At : uint8_t { kRecovery, kComposite, kLocal, kDense, kRecompute, kQuestion, kLastToken };

  static ReuseOptions SparseXOptions(ReuseOptions options);
  static By ByOf(const ReuseOptions& options);
  static Recompute RecomputeOf(const ReuseOptions& options);
  // choose=recovered: a stage of SparseX, the last one with the question's scores.
  PrefillStage Recovery(const ReuseLayout& layout, PrefillStage stage);

  // Whether stage 2 looks at local queries, or attended tokens, at all.
  bool AsksDocuments(const ReuseLayout& layout) const;
  PrefillStage NextUnknown(const ReuseLayout& layout);
  PrefillStage Composite(const ReuseLayout& layout);
  PrefillStage Chosen(const ReuseLayout& layout);
  PrefillStage BehindChoice(const ReuseLayout& layout);  // of what is left, with compact
  // recompute=sparsex: the dense layers of what is kept, which choose its rows; and these.
  PrefillStage Dense(const ReuseLayout& layout);
  PrefillStage ChosenRows(const ReuseLayout& layout, std::span<const int32_t> selected);
  PrefillStage Question(const ReuseLayout& layout);
  void Choose(const ReuseLayout& layout);
  PositionRanges KeptByAnyLayer() const;
  PositionRanges KeptBeforeQuestion(const ReuseLayout& layout) const;  // by any layer, behind the exact prefix
  PositionRanges NotAttended(const ReuseLayout& layout) const;         // middle tokens of the documents
  std::vector<SamKvDocument> Documents(const ReuseLayout& layout) const;
  // The text behind the documents; of a prompt that ends with one its last tile.
  static PositionRange QuestionOf(const ReuseLayout& layout);
  // Tiles [begin, end) of a document as positions.
  static PositionRange TilesOf(const PositionRange& document, int32_t begin, int32_t end);
  // Everything but the documents.
  static PositionRanges AlwaysSeen(const ReuseLayout& layout);
  static PositionRanges FixedTiles(const ReuseLayout& layout);
  PositionRanges AlwaysKept(const ReuseLayout& layout) const;
  // By attention (and recovered): the tiles of a document, which end where pages of the prompt do, so that what is kept
  // is whole pages. The first has up to half a page more, or less.
  static PositionRanges PageTiles(const PositionRange& document);
  // By attention: tokens that may be left out. By attention over copies as they are the first tile of a document, which
  // is what all its tokens attend to, may not.
  PositionRanges Candidates(const ReuseLayout& layout) const;
  int32_t num_initial() const { return choose_ == By::kRecovered ? 0 : kSamKvInitialTiles; }
  ScoreRequest QuestionScores(const ReuseLayout& layout, int32_t first_layer) const;
  std::vector<std::vector<int32_t>> TilesByAttention(const ReuseLayout& layout) const;
  double BudgetRatio(const ReuseLayout& layout) const;  // the request's, or the default's
  bool HasChoice(const ReuseLayout& layout) const;
  // What the rows of the next stage see: in every layer the same, or [num_layers].
  void See(const ReuseLayout& layout, std::span<const PositionRanges> visible);

  const ReuseOptions options_;
  const SamKvShape shape_;
  const By choose_;
  const Recompute recompute_;
  SparseXPolicy sparsex_;
  std::vector<CopySummary> summaries_;
  std::vector<float> means_;                    // of the stage before
  std::vector<std::vector<int32_t>> attended_;  // likewise
  std::vector<float> question_;                 // the question's mean queries; empty: nothing is to be chosen
  std::vector<float> scores_;  // by attention: of the candidates' tokens; empty: nothing is to be chosen
  At at_ = At::kComposite;
  size_t unknown_ = 0;                       // document of a kLocal stage
  std::vector<PositionRanges> kept_;         // [num_layers] once chosen
  PositionRanges copies_;                    // recompute=attended: what stays as it is
  bool compacted_ = false;                   // what was left out is gone; kept_ is everything that is left
  std::vector<std::vector<int32_t>> lists_;  // one for all layers, or [num_layers]
  bool sees_all_ = true;                     // nothing is left out of the stage: the model's own visibility
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
