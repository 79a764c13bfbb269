// Plans a layer for the methods with head classes, whichever rows they compute: visibility of each KV head, rows that
// run through feed-forward, heads that may be restored (RedKnot 3; docs/methods/redknot.md).
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class HeadClassPlan {
 public:
  // Classes by which the rows see: as while decoding (HeadClassMap::served), or as the map says of whole prompts
  // (HeadClassMap::in_prefill).
  enum class Sees : uint8_t { kAsDecoding, kAsInPrefill };
  // All arguments outlive the plan.
  HeadClassPlan(const ModelConfig& config, const HeadClassMap& map, const ReuseOptions& options, Sees sees)
      : config_(config), map_(map), options_(options), sees_(sees), ffn_(ScheduleOf(map.ffn(), options)) {}

  // Starts a prompt. Layers below `dense_layers` are exactly those of an exact prefill.
  void Begin(const ReuseLayout& layout, int32_t dense_layers);
  // Valid until the next call.
  LayerPlan Layer(int32_t layer);
  int32_t RestoreCap(int32_t first_kv_head, int32_t num_kv_heads) const;
  bool restores() const { return options_.restore_share > 0; }
  // Heads of `layer` whose attention scores rows: the global ones, because distant mass of a windowed head is never
  // used later. Empty: all heads score; also if none is global, or with score_all_heads.
  std::vector<int32_t> GlobalHeads(int32_t layer) const;

 private:
  static FfnSchedule ScheduleOf(FfnSchedule of_map, const ReuseOptions& options);
  FfnPlan FeedForward(int32_t layer) const;

  const ModelConfig& config_;
  const HeadClassMap& map_;
  const ReuseOptions& options_;
  const Sees sees_;
  const FfnSchedule ffn_;
  int32_t dense_layers_ = 0;
  int32_t keep_from_ = 0;
  std::vector<kernels::HeadVisibility> visibility_;
  std::vector<float> thresholds_;
};

}  // namespace spl::engine
