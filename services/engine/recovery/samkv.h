// Policy `samkv`, ours (docs/methods/samkv.md): of many documents only the tiles that the question needs are kept. A
// document is one copied run. The ways of the paper, and what we compared with, are baselines/samkv_paper.h.
//
// The stages of SparseX (sparsex.h) run over everything. In the last of them the attention that the question's last
// tokens pay to the documents is summed over its layers and all heads (kernels/selection/sparsex/column_scores.h):
// where one fact leads to another, the copies have learnt of each other by then, and attention points at both. Tiles
// are kept by what they are worth (TileWorth), the same in all layers. A last stage is the prompt's last token over
// everything, and makes what is kept final.
//
// Text that is in no document (fresh text, the exact prefix) is always kept. Positions keep their gaps; with `compact`
// what is kept moves together behind the choice, keys turned, as a shorter prompt. With budget_ratio 1 nothing is left
// out: that is SparseX. Behind a prompt without a copy KV is exact.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/recovery/samkv_choice.h"
#include "services/engine/recovery/sparsex.h"

namespace spl::engine {

class SamKvPolicy : public RecoveryPolicy {
 public:
  SamKvPolicy(const ModelConfig& config, const ReuseOptions& options)
      : RecoveryPolicy(config), options_(options), sparsex_(config, SparseXOptions(options)) {}
  std::string_view name() const final { return "samkv"; }
  bool reuses_segments() const final { return true; }
  int32_t first_cached_layer() const override { return sparsex_.first_cached_layer(); }
  int32_t max_segments() const final { return kSamKvMaxDocuments; }
  std::optional<int32_t> FirstQuantizedLayer(bool isolated) const override;
  void TakeScores(std::vector<float> scores) final { scores_ = std::move(scores); }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;
  std::span<const PositionRanges> kept() const final { return compacted_ ? std::span<const PositionRanges>() : kept_; }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  // Fills kept_.
  virtual void Choose(const ReuseLayout& layout);
  // Chooses, moves what is kept together with `compact`, and goes on with BehindChoice.
  PrefillStage Chosen(const ReuseLayout& layout);
  // The stage behind the choice. `only`: what of the prompt is left, by its old positions; empty: everything stays.
  virtual PrefillStage BehindChoice(const ReuseLayout& layout, const PositionRanges& only);
  // Tiles at the start of a document that are kept anyway.
  virtual int32_t num_initial() const { return 0; }
  virtual PositionRanges AlwaysKept(const ReuseLayout& layout) const;
  // Of a tile, tokens [begin, end) of a document with these scores.
  virtual float TileScore(std::span<const float> tokens, int32_t begin, int32_t end) const;
  virtual bool HasChoice(const ReuseLayout& layout) const;

  // The text behind the documents; in a prompt that ends with one its last tile.
  static PositionRange QuestionOf(const ReuseLayout& layout);
  // Everything but the documents.
  static PositionRanges AlwaysSeen(const ReuseLayout& layout);
  PositionRanges KeptByAnyLayer() const;
  ScoreRequest QuestionScores(const ReuseLayout& layout, int32_t first_layer) const;
  double BudgetRatio(const ReuseLayout& layout) const;  // the request's, or the default's

  const ReuseOptions options_;
  SparseXPolicy sparsex_;
  std::vector<float> scores_;         // of the candidates' tokens; empty: nothing is to be chosen by them
  std::vector<PositionRanges> kept_;  // [num_layers] once chosen

 private:
  static ReuseOptions SparseXOptions(ReuseOptions options);
  // A stage of SparseX, the last one with the question's scores.
  PrefillStage Recovery(const ReuseLayout& layout, PrefillStage stage);
  // The tiles of a document, which end where pages of the prompt do, so that what is kept is whole pages. The first has
  // up to half a page more, or less.
  static PositionRanges PageTiles(const PositionRange& document);
  // Tokens that may be left out.
  PositionRanges Candidates(const ReuseLayout& layout) const;
  std::vector<std::vector<int32_t>> TilesByAttention(const ReuseLayout& layout) const;

  bool compacted_ = false;  // what was left out is gone; kept_ is everything that is left
  bool last_ = false;       // the last stage was given out
};

}  // namespace spl::engine
