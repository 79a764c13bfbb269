// Policy `samkv` as the paper chooses and computes (SamKV 3.1 to 3.4; docs/methods/samkv.md), and steps between it and
// ours (samkv.h): what is kept is chosen first, and computed afresh with all of it in sight. Stages, each from layer 0
// on:
// choose=means, the paper's:
//  1. fresh text over initial and local tiles: gives the question's mean query of every layer;
//  2. for each document whose local query nobody has computed yet: its last two tiles over the document alone. By both
//     the tiles are chosen (samkv_choice.h); left out where there is nothing to choose.
// choose=attention, in their place: fresh text over everything, and the attention that the question's last tokens pay
// to the documents in all layers and heads (kernels/selection/sparsex/column_scores.h).
// choose=recovered: ours, followed by what follows here.
// With recompute=attended stage 2 runs for each document whose attended tokens nobody has found out, behind both, and
// also where there is nothing to choose.
// Then
//  3. recompute=samkv: kept tokens of all layers together and the fresh text in front of the question, each seeing what
//     stands before it of these (rules 1 and 2 for the union over the layers). recompute=attended: of the kept tokens
//     those of initial and local tiles and those to which their document by itself attends most
//     (SegmentSummary::attended, 3.3); the others stay copies. recompute=sparsex: of the kept tokens the rows that
//     SparseX would compute: all in its dense layers, where the question scores them, then the chosen ones;
//  4. the question, which in each layer sees what that layer keeps. With recompute=none all fresh text.
// With `compact` steps 3 and 4 are those of a shorter prompt of which every layer keeps everything. With budget_ratio 1
// and recompute=samkv the result is a full prefill.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/recovery/samkv.h"

namespace spl::engine {

class SamKvPaperPolicy final : public SamKvPolicy {
 public:
  SamKvPaperPolicy(const ModelConfig& config, const ReuseOptions& options);
  bool runs_alone(const ReuseLayout& layout) const override { return !layout.reused.empty(); }
  int32_t first_cached_layer() const override;
  bool wants_summaries() const override { return wants_tile_means() || wants_local_queries(); }
  bool wants_tile_means() const override { return choose_ == By::kMeans; }
  bool wants_local_queries() const override { return choose_ == By::kMeans || recompute_ == Recompute::kAttended; }
  std::optional<std::vector<int32_t>> TilesRead(int32_t num_tiles) const override;
  std::optional<int32_t> FirstQuantizedLayer(bool isolated) const override;
  void SetSummaries(std::vector<CopySummary> summaries) override { summaries_ = std::move(summaries); }
  void TakeQueryMeans(std::vector<float> means) override { means_ = std::move(means); }
  void TakeAttended(std::vector<std::vector<int32_t>> positions) override { attended_ = std::move(positions); }
  LayerPlan PlanLayer(int32_t layer) override;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  void Choose(const ReuseLayout& layout) override;
  PrefillStage BehindChoice(const ReuseLayout& layout, const PositionRanges& only) override;
  // By attention over copies as they are the first tile of a document, which is what all its tokens attend to, stays.
  int32_t num_initial() const override { return recovers() ? 0 : kSamKvInitialTiles; }
  PositionRanges AlwaysKept(const ReuseLayout& layout) const override;
  float TileScore(std::span<const float> tokens, int32_t begin, int32_t end) const override;
  bool HasChoice(const ReuseLayout& layout) const override;

 private:
  enum class By : uint8_t { kRecovered, kAttention, kMeans };           // ReuseOptions::choose
  enum class Recompute : uint8_t { kNone, kSparseX, kAttended, kAll };  // ReuseOptions::recompute
  enum class At : uint8_t { kRecovery, kComposite, kLocal, kDense, kRecompute, kQuestion };

  static By ByOf(const ReuseOptions& options);
  static Recompute RecomputeOf(const ReuseOptions& options);
  bool recovers() const { return choose_ == By::kRecovered; }
  // Whether stage 2 looks at local queries, or attended tokens, at all.
  bool AsksDocuments(const ReuseLayout& layout) const;
  PrefillStage NextUnknown(const ReuseLayout& layout);
  PrefillStage Composite(const ReuseLayout& layout);
  // recompute=sparsex: the dense layers of what is kept, which choose its rows; and these.
  PrefillStage Dense(const ReuseLayout& layout);
  PrefillStage ChosenRows(const ReuseLayout& layout, std::span<const int32_t> selected);
  PrefillStage Question(const ReuseLayout& layout);
  PositionRanges KeptBeforeQuestion(const ReuseLayout& layout) const;  // by any layer, behind the exact prefix
  PositionRanges NotAttended(const ReuseLayout& layout) const;         // middle tokens of the documents
  std::vector<SamKvDocument> Documents(const ReuseLayout& layout) const;
  // What the rows of the next stage see: in every layer the same, or [num_layers].
  void See(const ReuseLayout& layout, std::span<const PositionRanges> visible);

  const SamKvShape shape_;
  const By choose_;
  const Recompute recompute_;
  std::vector<CopySummary> summaries_;
  std::vector<float> means_;                    // of the stage before
  std::vector<std::vector<int32_t>> attended_;  // likewise
  std::vector<float> question_;                 // the question's mean queries; empty: nothing is to be chosen
  At at_ = At::kComposite;
  size_t unknown_ = 0;                       // document of a kLocal stage
  PositionRanges copies_;                    // recompute=attended: what stays as it is
  std::vector<std::vector<int32_t>> lists_;  // one for all layers, or [num_layers]
  bool sees_all_ = true;                     // nothing is left out of the stage: the model's own visibility
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
