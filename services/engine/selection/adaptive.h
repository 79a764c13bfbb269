// Selector `adaptive`: sparcas where choosing saves time, everything where it does not
// (docs/decisions/0016-decode-auto.md). Each step is of one kind; the engine decides which before it begins
// (step_modes.h, runtime/adaptive_decoding.h). In a step that chooses, heads whose chosen tokens hold too little of
// their attention attend to everything (runtime/mass_guard.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "services/engine/selection/sparcas.h"

namespace spl::engine {

// Attends to everything until it is told to choose. A step that chooses behind steps that did not packs the keys that
// they wrote; its plans are those of `sparcas` otherwise.
class AdaptiveSelector final : public SparCasSelector {
 public:
  static constexpr int32_t kCostedBudget = 2048;  // default of methods.cc, with which costs are measured
  AdaptiveSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                   const DecodeOptions& options);
  std::string_view name() const override { return "adaptive"; }
  bool is_exact() const override { return !chooses_; }
  AdaptiveSelector* adaptive() override { return this; }
  void BeginStep(int64_t kv_len) override;
  kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) override;
  uint64_t plan_key() const override;
  bool shares_plan() const override;

  // Whether a step of so many positions may choose: shorter contexts are attended to as a whole.
  bool may_choose(int64_t kv_len) const { return kv_len > 2 * int64_t{plan().budget}; }
  // Positions by which its context counts as shorter where costs are compared: these were measured with the default
  // budget, and a token of a list costs up to twice what one of a whole context does.
  int64_t surplus() const { return 2 * std::max<int64_t>(0, plan().budget - kCostedBudget); }
  // Decides the kind of the step that begins next, of `kv_len` positions. REQUIRES: may_choose(kv_len) if it chooses.
  void Decide(bool chooses, int64_t kv_len);
  bool chooses() const { return chooses_; }
  // Steps since one chose, for a step of `kv_len` positions; -1: none did.
  int64_t rested(int64_t kv_len) const { return last_choice_ < 0 ? -1 : kv_len - last_choice_ - 1; }

  // In steps of `first` to `last` positions the head attends to everything. REQUIRES: such a step has not begun.
  void Guard(int32_t layer, int32_t kv_head, int64_t first, int64_t last);
  // Whether the head chose in a step of `kv_len` positions that chose, and is not guarded later.
  bool MayGuard(int32_t layer, int32_t kv_head, int64_t kv_len) const {
    return guarded_[Number(layer, kv_head)].last < kv_len;
  }
  double mass_floor() const { return mass_floor_; }  // DecodeOptions::mass_floor

 private:
  // Positions of the steps in which a head attends to everything.
  struct Guarded {
    int64_t first = 0, last = 0;
    bool in(int64_t kv_len) const { return first <= kv_len && kv_len <= last; }
  };
  size_t Number(int32_t layer, int32_t kv_head) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(config().num_kv_heads) + static_cast<size_t>(kv_head);
  }

  const double mass_floor_;
  bool chooses_ = false;
  int64_t last_choice_ = -1;      // positions of the last step that chose
  int64_t kv_len_ = 0;            // positions of the last step
  std::vector<Guarded> guarded_;  // [num_layers * num_kv_heads]; heads that never choose: beyond all positions
  uint64_t guarded_key_ = 0;      // hash of the heads that are guarded in this step; 0: none is
};

}  // namespace spl::engine
