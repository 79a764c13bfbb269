// Policy `sparsex` (SparseX 4; docs/methods/sparsex.md). Dense layers before the boundary compute every row. The last
// of them measures the attention that fresh text pays to each reused token. Above it only fresh text, the k reused
// tokens with the most attention, and the edges of segments are computed.
//
// Copies in the context that they were computed in (CopyContext::kSame) are left as they are, in all layers: they take
// part in none of this, unless the request sets an option that says how many rows are recomputed. If all copies are
// such, there is one stage, of the fresh text.
//
// In the last dense layer only K and V of the rows that are not chosen are used, not their hidden states. So there are
// three stages: all rows up to the keys of that layer; the probes through it, to score; the chosen rows from it on. The
// result is the same as if that layer ran for all rows, and one layer is saved.
#pragma once

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class SparseXPolicy : public RecoveryPolicy {
 public:
  // How many reused tokens scores choose, unless the options say it: a share of them, and not fewer than `fewest_apart`
  // if some were computed in another context.
  struct Amount {
    double share;
    int32_t fewest_apart;
  };
  // How many tokens carry a fact from one isolated segment to another does not follow the prompt's length: with 64 of
  // 1,000 tokens 15 points of the answers are lost, with 256 none (docs/results/2026-11-23-short-prompts.md).
  static constexpr Amount kBehindDenseLayers = {.share = 0.05, .fewest_apart = 256};
  SparseXPolicy(const ModelConfig& config, const ReuseOptions& options, Amount amount = kBehindDenseLayers);
  std::string_view name() const override { return "sparsex"; }
  bool reuses_segments() const override { return true; }
  int32_t first_cached_layer() const override { return first_cached_layer_; }
  double SavedByCopy() const override;
  int32_t dense_layers_run() const override { return runs_dense_ ? dense_layers_ : 0; }
  EdgeRows Edges(const ReuseLayout& layout) const override;
  PositionRanges RowsOfAllStages(const ReuseLayout& layout) const override;
  double PredictedRows(const ReuseLayout& layout) override;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

  // Number of dense layers before the boundary.
  int32_t DenseLayersOf(const ReuseLayout& layout) const;
  // Number of reused tokens, out of `num_reused` of the layout, that scores choose.
  int64_t NumChosen(const ReuseLayout& layout, int64_t num_reused, Amount amount) const;
  int64_t NumChosen(const ReuseLayout& layout, int64_t num_reused) const {
    return NumChosen(layout, num_reused, amount_);
  }
  // Rows that are computed without regard to scores: fresh text, and the edges of reused text.
  PositionRanges RowsWithoutScores(const ReuseLayout& layout) const;
  // Dense layers by default. Segments in the same context: a sixth of the layers of a small dense model, an eighth of a
  // large model or one with experts (docs/methods/sparsex.md: 15–20 % and 10–15 %). Isolated and foreign ones
  // (`isolated`): twice as many, because their relations to each other were never computed, and attention needs these
  // layers to find them (docs/results, segments).
  static int32_t DefaultDenseLayers(const ModelConfig& config, bool isolated);

 protected:
  void Prepare(const ReuseLayout& layout) override;
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  // Called with every request for scores, before it is used: may change `k`, and set `kv_heads` for `num_layers` layers
  // from score.layer on.
  virtual void RefineScore(const ReuseLayout& /*layout*/, int32_t /*num_layers*/, ScoreRequest& /*score*/) const {}
  // Asks for `amount` of the copies by the scores of `num_layers` layers from `layer` on.
  ScoreRequest Scores(const ReuseLayout& layout, int32_t layer, int32_t num_layers, Amount amount) const;
  const ReuseOptions& options() const { return options_; }
  int32_t dense_layers() const { return dense_layers_; }
  // Rows that are computed, summed over the layers: products take time in proportion.
  int64_t CostOf(const ReuseLayout& layout) const;
  // The copies that are recovered: all, or those in another context.
  PositionRanges Recovered(const ReuseLayout& layout) const;
  // Rows whose attention scores the copies: fresh text, and the tail.
  PositionRanges ProbeRows(const ReuseLayout& layout) const;
  // The last reused tokens, if no fresh text follows them.
  PositionRanges Tail(const ReuseLayout& layout) const;

 private:
  PrefillStage Probes(const ReuseLayout& layout) const;
  // Tokens of recovered copies next to fresh text.
  PositionRanges Overflow(const ReuseLayout& layout) const;
  PositionRanges Links(const ReuseLayout& layout) const;

  const ReuseOptions options_;
  const Amount amount_;
  int32_t dense_layers_ = 0;        // known from Prepare on
  int32_t first_cached_layer_ = 0;  // known from Prepare on
  bool runs_dense_ = false;         // some copies are recovered above dense layers
  enum class Next { kNothing, kProbes, kChosen };
  Next next_ = Next::kNothing;
};

}  // namespace spl::engine
