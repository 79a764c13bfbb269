// Policy `redknot`: computes every row after the exact prefix. Local heads see only their sinks and their window. In
// the deeper layers only the rows with the largest attention output run through feed-forward (RedKnot 3;
// docs/methods/redknot.md, "What a head sees"). Copies of segments are not used.
#pragma once

#include "services/engine/recovery/head_class_plan.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class RedKnotPolicy final : public RecoveryPolicy {
 public:
  RedKnotPolicy(const ModelConfig& config, const HeadClassMap& map, const ReuseOptions& options)
      : RecoveryPolicy(config), options_(options), plan_(config, map, options_, HeadClassPlan::Sees::kAsInPrefill) {}
  std::string_view name() const override { return "redknot"; }
  bool reuses_segments() const override { return false; }
  bool is_exact(const ReuseLayout&) const override { return false; }
  bool runs_alone(const ReuseLayout&) const override { return true; }
  LayerPlan PlanLayer(int32_t layer) override { return plan_.Layer(layer); }
  int32_t RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const override {
    return plan_.RestoreCap(first_kv_head, num_kv_heads);
  }

 protected:
  void Prepare(const ReuseLayout& layout) override { plan_.Begin(layout, std::max(0, options_.dense_layers)); }

 private:
  const ReuseOptions options_;
  HeadClassPlan plan_;
};

}  // namespace spl::engine
