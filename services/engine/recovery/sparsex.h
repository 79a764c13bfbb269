// Policy `sparsex`: every row in the dense layers before the boundary, there the attention that fresh text pays to each
// reused token, then only fresh text, the k tokens with the most of it, and the edges (SparseX 4;
// docs/methods/sparsex.md).
//
// Of the last dense layer, rows that are not chosen leave K and V and nothing else: what the layer makes of their
// hidden state is read by nobody. So three stages: all rows up to the keys of that layer; the probes through it, which
// scores; the chosen rows from it on. The result is the same as with the whole layer for all rows, for a layer's price
// less.
#pragma once

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class SparseXPolicy : public RecoveryPolicy {
 public:
  SparseXPolicy(const ModelConfig& config, const ReuseOptions& options);
  std::string_view name() const override { return "sparsex"; }
  bool reuses_segments() const override { return true; }
  int32_t first_cached_layer() const override { return dense_layers_; }
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

  // Layers before the boundary.
  int32_t DenseLayersOf(const ReuseLayout& layout) const;
  // How many of so many reused tokens of the layout are chosen by scores.
  int64_t NumChosen(const ReuseLayout& layout, int64_t num_reused) const;
  // Fresh text, and what of the reused text is computed wherever attention points.
  PositionRanges RowsWithoutScores(const ReuseLayout& layout) const;
  // Segments cached in context: a sixth of the layers of a small dense model, an eighth of a large one or one of
  // experts (docs/methods/sparsex.md: 15–20 % and 10–15 %). Isolated ones: twice that, because what relates them to
  // each other has never been computed, and it takes the layers up to there until attention points at it (docs/results,
  // segments).
  static int32_t DefaultDenseLayers(const ModelConfig& config, bool isolated);

 protected:
  void Prepare(const ReuseLayout& layout) override;
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  virtual void RefineScore(const ReuseLayout& /*layout*/, ScoreRequest& /*score*/) const {}
  const ReuseOptions& options() const { return options_; }
  int32_t dense_layers() const { return dense_layers_; }

 private:
  PrefillStage Probes(const ReuseLayout& layout) const;
  // The last reused tokens, where no fresh text follows them.
  PositionRanges Tail(const ReuseLayout& layout) const;
  // Reused tokens next to fresh text.
  PositionRanges Overflow(const ReuseLayout& layout) const;
  PositionRanges Links(const ReuseLayout& layout) const;

  const ReuseOptions options_;
  int32_t dense_layers_ = 0;  // known from Prepare on
  enum class Next { kNothing, kProbes, kChosen };
  Next next_ = Next::kNothing;
};

}  // namespace spl::engine
