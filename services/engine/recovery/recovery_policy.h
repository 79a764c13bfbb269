// A prefill method as a plan for the layer-by-layer executor (DESIGN section 2).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/visibility.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// What one layer does with the rows of one sequence.
struct LayerPlan {
  // What the rows of each KV head attend to. [num_kv_heads]; valid until the next PlanLayer of the same policy.
  std::span<const kernels::HeadVisibility> visibility;
};

// One object per request; used by the engine thread only. A policy decides and never allocates pages, copies or runs
// kernels: that is the executor's part.
class RecoveryPolicy {
 public:
  virtual ~RecoveryPolicy() = default;
  virtual std::string_view name() const = 0;
  // True when the KV it produces from exact keys is exact (algorithms.md 6.3): the model's own causal
  // attention (its sliding window where it has one), its own feed-forward, every row, every layer. Only then may its
  // pages enter the prefix index and the chunk store.
  virtual bool is_exact() const = 0;
  virtual LayerPlan PlanLayer(int32_t layer) = 0;
};

// By name; "" and "auto" choose the best policy this build has for the model. Unimplemented for an unknown one, with
// the names there are.
absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(std::string_view name, const ModelConfig& config);
std::vector<std::string> RecoveryPolicyNames();

}  // namespace spl::engine
