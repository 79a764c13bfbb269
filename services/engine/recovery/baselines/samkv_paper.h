// Policy `samkv` as the paper chooses and computes (SamKV 3.1 to 3.4; docs/methods/samkv.md), and steps between it and
// ours (samkv.h). The kept tokens are chosen first, and then computed afresh while they see all of each other.
//
// First stages, each from layer 0 on, by `choose`:
//  - means, the paper's:
//    1. Fresh text over initial and local tiles gives the question's mean query of every layer.
//    2. The last two tiles of a document over the document alone give its local query. Runs for each document whose
//       local query is not known yet. Both kinds of queries choose the tiles (samkv_choice.h). Left out if there is
//       nothing to choose.
//  - attention: fresh text over everything, and the attention that the question's last tokens pay to the documents in
//    all layers and heads (kernels/selection/sparsex/column_scores.h).
//  - recovered: ours.
// With recompute=attended stage 2 also runs, after these, for each document whose attended tokens are not known, even
// if there is nothing to choose.
//
// Last stages:
//    3. Kept tokens, by `recompute`:
//       samkv: kept tokens of all layers together, and the fresh text before the question. Each sees the earlier ones
//       of these (rules 1 and 2 for the union over the layers).
//       attended: the kept tokens of initial and local tiles, and those to which their document by itself attends most
//       (SegmentSummary::attended, 3.3). The others stay copies.
//       sparsex: the kept tokens that SparseX would compute: all in its dense layers, where the question scores them,
//       then the chosen ones.
//    4. The question, which sees in each layer the tokens that the layer keeps. With recompute=none: all fresh text.
// With `compact`, stages 3 and 4 run on a shorter prompt of which every layer keeps everything. With budget_ratio 1 and
// recompute=samkv the result is a full prefill.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/recovery/samkv.h"

namespace spl::engine {

class SamKvPaperPolicy final : public SamKvPolicy {
 public:
  SamKvPaperPolicy(const ModelConfig& config, const ReuseOptions& options, const RecoveryProfile* profile);
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
  // Without recovered copies the first tile of a document stays: all tokens of the document attend to it.
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
  // Whether stage 2 runs at all, for local queries or attended tokens.
  bool AsksDocuments(const ReuseLayout& layout) const;
  PrefillStage NextUnknown(const ReuseLayout& layout);
  PrefillStage Composite(const ReuseLayout& layout);
  // recompute=sparsex: the dense layers over the kept tokens, which score them; then the rows that were chosen.
  PrefillStage Dense(const ReuseLayout& layout);
  PrefillStage ChosenRows(const ReuseLayout& layout, std::span<const int32_t> selected);
  PrefillStage Question(const ReuseLayout& layout);
  PositionRanges KeptBeforeQuestion(const ReuseLayout& layout) const;  // by any layer, after the exact prefix
  PositionRanges NotAttended(const ReuseLayout& layout) const;         // middle tokens of the documents
  std::vector<SamKvDocument> Documents(const ReuseLayout& layout) const;
  // Sets the positions that the rows of the next stage see: one entry for all layers, or [num_layers].
  void See(const ReuseLayout& layout, std::span<const PositionRanges> visible);

  const SamKvShape shape_;
  const By choose_;
  const Recompute recompute_;
  std::vector<CopySummary> summaries_;
  std::vector<float> means_;                    // from the last stage
  std::vector<std::vector<int32_t>> attended_;  // from the last stage
  std::vector<float> question_;                 // the question's mean queries; empty: there is nothing to choose
  At at_ = At::kComposite;
  size_t unknown_ = 0;                       // document of a kLocal stage
  PositionRanges copies_;                    // recompute=attended: copies that are not computed
  std::vector<std::vector<int32_t>> lists_;  // one for all layers, or [num_layers]
  bool sees_all_ = true;                     // the stage leaves nothing out: the model's own visibility
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
