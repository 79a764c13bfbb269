// Guards the quality of a sequence with the method `adaptive`: it learns how much of each head's attention the tokens
// hold that a step chose. A KV head below the floor attends to everything for a while.
//
// Steps that choose by packed keys estimate it, each of them (kernels/selection/sparcas/sparse_attention.h, "mass"):
// that costs next to nothing, and such a step still starts ahead of the tokens of the one before. The next step may
// have begun when the estimates come, so that a guard begins with the one after it, whether steps start ahead or not.
// With keys of 16 bits nothing is estimated: from time to time a step is measured instead.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "services/engine/execution/decode_row.h"
#include "services/engine/execution/pending_mass.h"
#include "services/engine/model/model_config.h"
#include "services/engine/runtime/decode_choice.h"
#include "services/engine/selection/adaptive.h"

namespace spl::engine {

// Belongs to one continuation. Engine thread.
class MassGuard {
 public:
  // Positions between two measurements of a sequence. Its first step that chooses is measured.
  static constexpr int64_t kInterval = 64;
  // Steps of an engine between two measurements, whosever: one costs about a dense step, and runs by itself.
  static constexpr int64_t kSpacing = 16;
  // Positions for which a head that was below the floor attends to everything.
  static constexpr int64_t kGuarded = 256;

  // Whether the steps of a selector with this plan estimate: their operation weighs what it leaves out.
  static bool Estimates(const ScoringPlan& plan) {
    return plan.scoring == TokenScoring::kPackedKeys && plan.recent < plan.budget;
  }
  // `everything`: the selector of the same sequence without choices, to measure with. Null: steps estimate.
  MassGuard(const ModelConfig& config, std::unique_ptr<TokenSelector> everything);

  bool estimates() const { return everything_ == nullptr; }
  // Takes what a step of `kv_len` positions that chose has estimated for row `row`: guards heads of the selector.
  void Take(AdaptiveSelector& selector, int64_t kv_len, const KeptMass& mass, size_t row);

  // Whether a step of `kv_len` positions that chooses should be measured.
  bool IsDue(int64_t kv_len) const { return !estimates() && (measured_ < 0 || kv_len - measured_ >= kInterval); }
  int64_t measured() const { return measured_; }  // positions of the last step that was measured; -1: none
  // For the row of a step of `kv_len` positions that is measured. Valid until the next call. REQUIRES: IsDue(kv_len).
  MassProbe* Begin(int64_t kv_len);
  // After that step, of `kv_len` positions: guards heads of the selector.
  void End(AdaptiveSelector& selector, int64_t kv_len);
  // Adds what the last step has told to its description, once.
  void Describe(StepChoice& step);

 private:
  // The head kept so much. guards_from: positions of the first step that is guarded if that is too little.
  void Judge(AdaptiveSelector& selector, int32_t layer, int32_t kv_head, double kept, int64_t guards_from);

  const ModelConfig& config_;  // the model's; the model outlives its sequences
  const std::unique_ptr<TokenSelector> everything_;
  MassProbe probe_;
  int64_t measured_ = -1;
  std::optional<StepChoice> report_;
};

}  // namespace spl::engine
