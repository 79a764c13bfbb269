// Scores positions by the attention that some rows pay to them (kernels/selection/sparsex/column_scores.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

struct ColumnScoringOptions {
  int32_t layer = 0;
  bool all_layers = false;    // in all layers from `layer` on
  PositionRanges probes;      // rows whose attention is summed
  PositionRanges candidates;  // positions that are scored
  // For each layer that scores: heads of the model whose attention counts, ascending; empty: all of the layer. The list
  // itself empty: all of every layer.
  std::vector<std::vector<int32_t>> kv_heads;
  // Scores each KV head of the rank by itself, in all layers from `layer` on. Ignores kv_heads.
  bool every_head = false;
  // Device memory; scores are added to it. [candidates], range after range. With every_head: [layers, the rank's KV
  // heads, candidates up to the last row of the pass].
  float* scores = nullptr;
};

class ColumnScoring final : public LayerObserver {
 public:
  explicit ColumnScoring(ColumnScoringOptions options) : options_(std::move(options)) {}
  void BeginPass(std::span<const int32_t> positions) override;
  bool wants_lse(int32_t layer, const LayerPlan& /*plan*/) const override { return Scores(layer); }
  absl::Status AfterAttention(const LayerView& view) override;

  const ColumnScoringOptions& options() const { return options_; }

 private:
  bool Scores(int32_t layer) const {
    return options_.every_head || options_.all_layers ? layer >= options_.layer : layer == options_.layer;
  }

  const ColumnScoringOptions options_;
  std::vector<int32_t> probes_;  // rows of the slice
  PositionRanges candidates_;    // those that rows of the pass may see
  std::vector<int32_t> heads_;   // as the rank numbers them
};

}  // namespace spl::engine
