// Policy `sparsex` without dense layers (docs/methods/sparsex.md, "A probe instead of dense layers"; the two stages are
// ProphetKV's). The fresh text alone runs through the first layers over the copies as they are, and the last of these
// layers score the reused tokens by SparseX's equations. Then fresh text, chosen tokens and edges of segments are
// computed from layer 0 on, through all layers.
//
// No layer computes every row, so the depth at which rows are chosen costs little: the fresh text's rows in these
// layers. But the probe sees copies that lack their context, and rows that are not chosen keep theirs in all layers.
// The question stands at the end, and it is what has to find its facts in the copies. So the probe consists of the last
// kProbeTokens of the fresh text only (probe_tokens), and of what stands beside copies or at the start of the prompt:
// whole pages of fresh text in front of that are neither computed nor seen in the probe (PrefillStage::unseen).
//
// The probe's own rows are computed twice. Unless the request names probe_layers, dense layers are taken where they
// cost less. With probe_layers 0 or dense_layers, or copies that lack lower layers, there is no probe, and this is
// SparseXPolicy.
#pragma once

#include "services/engine/model/recovery_profile.h"
#include "services/engine/recovery/sparsex.h"

namespace spl::engine {

class SparseXProbePolicy : public SparseXPolicy {
 public:
  // A probe chooses so many by default. How many are needed hardly grows with the prompt: of 2,048 and 4,096 tokens 256
  // are too few, of 8,192 tokens 410, of 16,384 tokens 491; more than 573 and 819 add no answers there
  // (docs/results/2026-11-26-three-hundred-questions.md, 2026-11-27-fewer-rows.md).
  static constexpr Amount kBehindProbe = {.share = 0.05, .fewest_apart = 576};
  // A probe has so many tokens by default: with 512 and with 128 as many answers are right
  // (docs/results/2026-11-27-fewer-rows.md).
  static constexpr int32_t kProbeTokens = 256;
  // Time of a row on the way with a probe, in rows of the way with dense layers. Measured: 1.14 on a GPU
  // (docs/results/2026-11-26-probe-on-a-gpu.md, "Time"), 1.3 to 1.4 on a CPU, for splice in the demo
  // (docs/results/2026-11-26-splice-behind-a-probe.md).
  static constexpr double kProbeRowCost = 1.2;
  // REQUIRES: the options are valid (ValidateReuseOptions).
  // `profile`: what holds for this model where the options say nothing; null: all layers, half of them, kBehindProbe.
  // `least_share`: least share of the copies that is recomputed, with and without a probe, unless the options name one.
  SparseXProbePolicy(const ModelConfig& config, const ReuseOptions& options, const RecoveryProfile* profile = nullptr,
                     double least_share = 0);
  int32_t first_cached_layer() const override { return probes_ ? 0 : SparseXPolicy::first_cached_layer(); }
  int32_t probe_layers() const override { return probed_ ? end_ : 0; }
  int32_t dense_layers_run() const override { return probed_ ? 0 : SparseXPolicy::dense_layers_run(); }
  double PredictedRows(const ReuseLayout& layout) override;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;

 protected:
  void Prepare(const ReuseLayout& layout) override;
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  // Whether rows are chosen by a probe; dense layers otherwise. Known from Prepare on.
  bool probes() const { return probes_; }
  // Whether the stage that runs is the probe, whose rows see and compute everything.
  bool is_probing() const { return chooses_; }

 private:
  // Cost of the probe and the rows behind it, in rows of SparseXPolicy::CostOf.
  double CostOf(const ReuseLayout& layout) const;
  ScoreRequest ProbeScores(const ReuseLayout& layout) const;
  // Pages of fresh text that the probe does not see.
  PositionRanges Unseen(const ReuseLayout& layout) const;

  const Amount chosen_;    // unless the options say it
  const int32_t end_;      // the probe's layers are [0, end_)
  const int32_t scoring_;  // the last of them that score
  bool probes_ = false;    // known from Prepare on; false: dense layers cost less, or the request wants them
  bool probed_ = false;    // the prompt has copies that are recovered, and the probe chose
  bool chooses_ = false;   // the probe was given out, the rows that it chooses were not
};

}  // namespace spl::engine
