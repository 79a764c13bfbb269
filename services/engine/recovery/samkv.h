// Policy `samkv`, our variant (docs/methods/samkv.md): keeps only the tiles of many documents that the question needs.
// A document is one copied run. The paper's variant, and others that we compared with, are in baselines/samkv_paper.h.
//
// The stages of SparseX (sparsex_probe.h) run over everything. The last of them sums the attention that the question's
// last tokens pay to the documents over its layers and all heads (kernels/selection/sparsex/column_scores.h). If one
// fact leads to another, the recovered copies have seen each other by then, and attention points at both. Tiles are
// chosen by their score (TileWorth), the same in all layers. The last stage runs the prompt's last token over
// everything, and makes the kept KV final.
//
// Text outside of documents (fresh text, the exact prefix) is always kept. Positions keep their gaps. With `compact`
// the kept tokens move together after the choice, with rotated keys, as a shorter prompt. With budget_ratio 1 nothing
// is left out: that is SparseX. The KV of a prompt without copies is exact.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/recovery/samkv_choice.h"
#include "services/engine/recovery/sparsex_probe.h"

namespace spl::engine {

class SamKvPolicy : public RecoveryPolicy {
 public:
  // `profile`: as SparseXProbePolicy's. Outlives the policy; may be null.
  SamKvPolicy(const ModelConfig& config, const ReuseOptions& options, const RecoveryProfile* profile)
      : RecoveryPolicy(config), options_(options), sparsex_(config, options, profile, kRecomputeShare) {}
  std::string_view name() const final { return "samkv"; }
  bool reuses_segments() const final { return true; }
  int32_t first_cached_layer() const override { return sparsex_.first_cached_layer(); }
  int32_t probe_layers() const override { return sparsex_.probe_layers(); }
  double SavedByCopy() const override { return sparsex_.SavedByCopy(); }
  int32_t dense_layers_run() const override { return sparsex_.dense_layers_run(); }
  EdgeRows Edges(const ReuseLayout& layout) const override { return sparsex_.Edges(layout); }
  // The last token runs twice.
  double PredictedRows(const ReuseLayout& layout) override { return sparsex_.PredictedRows(layout) + 1; }
  double PredictedKept(const ReuseLayout& layout) const override { return HasChoice(layout) ? BudgetRatio(layout) : 1; }
  int32_t max_segments() const final { return kSamKvMaxDocuments; }
  std::optional<int32_t> FirstQuantizedLayer(bool isolated) const override;
  void TakeScores(std::vector<float> scores) final { scores_ = std::move(scores); }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;
  std::span<const PositionRanges> kept() const final { return compacted_ ? std::span<const PositionRanges>() : kept_; }

 protected:
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  // Fills kept_.
  virtual void Choose(const ReuseLayout& layout);
  // Chooses, moves the kept tokens together if `compact`, and continues with BehindChoice.
  PrefillStage Chosen(const ReuseLayout& layout);
  // Gives the stage after the choice. `only`: the old positions of the prompt that stay; empty: everything stays.
  virtual PrefillStage BehindChoice(const ReuseLayout& layout, const PositionRanges& only);
  // Tiles at the start of a document that are always kept.
  virtual int32_t num_initial() const { return 0; }
  virtual PositionRanges AlwaysKept(const ReuseLayout& layout) const;
  // Score of a tile: tokens [begin, end) of a document, whose tokens have these scores.
  virtual float TileScore(std::span<const float> tokens, int32_t begin, int32_t end) const;
  virtual bool HasChoice(const ReuseLayout& layout) const;

  // The text after the documents. If the prompt ends with a document: that document's last tile. If a small budget has
  // left out every document: everything after the prefix.
  static PositionRange QuestionOf(const ReuseLayout& layout);
  // Everything except the documents.
  static PositionRanges AlwaysSeen(const ReuseLayout& layout);
  PositionRanges KeptByAnyLayer() const;
  ScoreRequest QuestionScores(const ReuseLayout& layout, int32_t first_layer) const;
  double BudgetRatio(const ReuseLayout& layout) const;  // the request's, or the default

  const ReuseOptions options_;
  SparseXProbePolicy sparsex_;
  std::vector<float> scores_;         // scores of the candidates' tokens; empty: no choice by scores
  std::vector<PositionRanges> kept_;  // [num_layers] once chosen

 private:
  static constexpr double kRecomputeShare = 0.15;  // docs/results/2026-11-22-samkv.md

  // Gives a stage of SparseX; the last one also computes the question's scores.
  PrefillStage Recovery(const ReuseLayout& layout, PrefillStage stage);
  // Tiles of a document, cut where pages (blocks) of the prompt end, so that whole pages are kept. The first tile is up
  // to half a page longer or shorter.
  static PositionRanges PageTiles(const PositionRange& document);
  // Tokens that may be left out.
  PositionRanges Candidates(const ReuseLayout& layout) const;
  std::vector<std::vector<int32_t>> TilesByAttention(const ReuseLayout& layout) const;

  bool compacted_ = false;  // the dropped tokens are gone; kept_ is the whole prompt
  bool last_ = false;       // the last stage was given out
};

}  // namespace spl::engine
