#include "services/engine/recovery/recovery_policy.h"

#include "services/base/status.h"
#include "services/engine/recovery/exact.h"

namespace spl::engine {

std::vector<std::string> RecoveryPolicyNames() { return {"exact"}; }

absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(std::string_view name, const ModelConfig& config) {
  if (name.empty() || name == "auto" || name == "exact") return std::make_unique<ExactPolicy>(config);
  return Errorf(absl::StatusCode::kUnimplemented, "reuse policy '{}' is not served by this build; it has: {}", name,
                fmt::join(RecoveryPolicyNames(), ", "));
}

}  // namespace spl::engine
