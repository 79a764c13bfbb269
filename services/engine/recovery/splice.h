// Policies `splice` and `splice+`: SparseX's rows with RedKnot's heads (docs/methods/splice.md). Dense layers are
// exact. Above them the rows that SparseX chooses attend with head classes, and only those with the largest attention
// output run through feed-forward. Scores count all heads, or global ones only (score_all_heads).
//
// If splice reuses nothing of a prompt, the prompt is computed exactly: later prompts copy its KV, which could be no
// source if it were computed with windows. Decoding keeps KV by head class in any case.
//
// splice+ computes more rows, the next best by score, up to rec_frac of the prompt. With all rows it is redknot above
// the dense layers. With all heads global and dense feed-forward, splice is sparsex.
#pragma once

#include "services/engine/recovery/head_class_plan.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/recovery/sparsex.h"

namespace spl::engine {

class SplicePolicy final : public SparseXPolicy {
 public:
  SplicePolicy(const ModelConfig& config, const HeadClassMap& map, const ReuseOptions& options)
      : SparseXPolicy(config, options), plan_(config, map, this->options()) {}
  std::string_view name() const override { return options().policy == "splice+" ? "splice+" : "splice"; }
  bool is_exact(const ReuseLayout& layout) const override { return !uses_classes(!layout.reused.empty()); }
  bool runs_alone(const ReuseLayout& layout) const override { return uses_classes(!layout.reused.empty()); }
  LayerPlan PlanLayer(int32_t layer) override {
    return uses_classes(reuses_) ? plan_.Layer(layer) : SparseXPolicy::PlanLayer(layer);
  }
  int32_t RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const override {
    return uses_classes(reuses_) ? plan_.RestoreCap(first_kv_head, num_kv_heads) : 0;
  }

 protected:
  void Prepare(const ReuseLayout& layout) override;
  void RefineScore(const ReuseLayout& layout, ScoreRequest& score) const override;

 private:
  bool uses_classes(bool reuses) const { return reuses || options().policy == "splice+"; }

  HeadClassPlan plan_;
  bool reuses_ = false;
};

}  // namespace spl::engine
