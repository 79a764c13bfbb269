// Policies `splice` and `splice+`: SparseX's rows with RedKnot's heads (docs/methods/splice.md). The rows that SparseX
// chooses, by a probe (sparsex_probe.h) or above dense layers, are computed, and only those with the largest attention
// output run through feed-forward. The probe and the dense layers see and compute everything. Scores count all heads,
// or global ones only (score_all_heads).
//
// splice computes the chosen rows in two stages: first the rows in front of the question, which see everything, then
// the question, which sees by class, as the answer will. The rows in front are few, so windows would save little there,
// and they carry what one document says into another: with windows a third of the answers are lost that need this
// (docs/results/2026-11-26-splice-behind-a-probe.md).
//
// If splice reuses nothing of a prompt, the prompt is computed exactly: later prompts copy its KV, which could be no
// source if it were computed with windows. Decoding keeps KV by head class in any case.
//
// splice+ computes more rows, the next best by score, up to rec_frac of the prompt, and all of them see by class. With
// all rows it is redknot, above the dense layers if there are any. With all heads global and dense feed-forward, both
// are sparsex.
#pragma once

#include "services/engine/recovery/head_class_plan.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/recovery/sparsex_probe.h"

namespace spl::engine {

class SplicePolicy final : public SparseXProbePolicy {
 public:
  // `map` and `profile` outlive the policy; `profile` may be null (sparsex_probe.h).
  SplicePolicy(const ModelConfig& config, const HeadClassMap& map, const ReuseOptions& options,
               const RecoveryProfile* profile = nullptr)
      : SparseXProbePolicy(config, options, profile),
        plan_(config, map, this->options(),
              options.policy == "splice+" ? HeadClassPlan::Sees::kAsInPrefill : HeadClassPlan::Sees::kAsDecoding) {}
  std::string_view name() const override { return options().policy == "splice+" ? "splice+" : "splice"; }
  bool is_exact(const ReuseLayout& layout) const override { return !uses_classes(!layout.reused.empty()); }
  bool runs_alone(const ReuseLayout& layout) const override { return uses_classes(!layout.reused.empty()); }
  LayerPlan PlanLayer(int32_t layer) override;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) override;
  int32_t RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const override {
    return uses_classes(reuses_) ? plan_.RestoreCap(first_kv_head, num_kv_heads) : 0;
  }

 protected:
  void Prepare(const ReuseLayout& layout) override;
  PrefillStage FirstReuseStage(const ReuseLayout& layout) override;
  void RefineScore(const ReuseLayout& layout, int32_t num_layers, ScoreRequest& score) const override;

 private:
  bool uses_classes(bool reuses) const { return reuses || options().policy == "splice+"; }

  // Gives the rows of a last stage that stand in front of the question, and keeps the others for the stage behind it.
  // Other stages stay as they are.
  PrefillStage InFrontOfQuestion(const ReuseLayout& layout, PrefillStage stage);

  HeadClassPlan plan_;
  bool reuses_ = false;
  std::optional<PrefillStage> question_;  // the stage behind the one that runs, whose rows see everything
};

}  // namespace spl::engine
