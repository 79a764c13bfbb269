// Guards the quality of a sequence with the method `adaptive`: from time to time a step that chooses also measures how
// much of each head's attention its chosen tokens hold. A head below the floor attends to everything for a while.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "services/engine/execution/decode_row.h"
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

  // `everything`: the selector of the same sequence without choices.
  MassGuard(const ModelConfig& config, std::unique_ptr<TokenSelector> everything);

  // Whether a step of `kv_len` positions that chooses should be measured.
  bool IsDue(int64_t kv_len) const { return measured_ < 0 || kv_len - measured_ >= kInterval; }
  int64_t measured() const { return measured_; }  // positions of the last step that was measured; -1: none
  // For the row of a step of `kv_len` positions that is measured. Valid until the next call.
  MassProbe* Begin(int64_t kv_len);
  // After that step, of `kv_len` positions: guards heads of the selector.
  void End(AdaptiveSelector& selector, int64_t kv_len);
  // Adds what the last step measured to its description, once.
  void Describe(StepChoice& step);

 private:
  const ModelConfig& config_;  // the model's; the model outlives its sequences
  const std::unique_ptr<TokenSelector> everything_;
  MassProbe probe_;
  int64_t measured_ = -1;
  std::optional<StepChoice> report_;
};

}  // namespace spl::engine
