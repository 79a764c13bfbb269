// What the methods with head classes do in a layer, whichever rows they compute: what each KV head sees, which rows run
// through feed-forward, which heads may be restored (RedKnot 3; docs/methods/redknot.md).
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class HeadClassPlan {
 public:
  // All arguments outlive the plan.
  HeadClassPlan(const ModelConfig& config, const HeadClassMap& map, const ReuseOptions& options)
      : config_(config), map_(map), options_(options), ffn_(ScheduleOf(map.ffn(), options)) {}

  // Layers below `dense_layers` are those of an exact prefill in every respect.
  void Begin(const ReuseLayout& layout, int32_t dense_layers);
  // Valid until the next call.
  LayerPlan Layer(int32_t layer);
  int32_t RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const;
  bool restores() const { return options_.restore_share > 0; }
  // Of `layer`, by whose attention rows are scored, unless all heads are asked: distant mass of a windowed head is
  // never used later. Empty: all, also when none is global.
  std::vector<int32_t> GlobalHeads(int32_t layer) const;

 private:
  static FfnSchedule ScheduleOf(FfnSchedule of_map, const ReuseOptions& options);
  FfnPlan FeedForward(int32_t layer) const;

  const ModelConfig& config_;
  const HeadClassMap& map_;
  const ReuseOptions& options_;
  const FfnSchedule ffn_;
  int32_t dense_layers_ = 0;
  int32_t keep_from_ = 0;
  std::vector<kernels::HeadVisibility> visibility_;
  std::vector<float> thresholds_;
};

}  // namespace spl::engine
