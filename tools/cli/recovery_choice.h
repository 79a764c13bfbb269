// Chooses a recovery profile from the table of `splice eval --suite recovery`.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "services/engine/model/recovery_profile.h"

namespace spl::cli {

// The cheapest settings of `sparsex` that answer as `exact` does. Only tasks that exact answers at 80 % or more count,
// and of each setting all lengths of a provenance together: it may be one point of the answers behind exact in each
// provenance. The fewest recomputed tokens are the cheapest, then the fewest layers of the probe, then the most right
// answers. `table`: what `splice eval --json` writes; rows of other methods are left aside. The profile has no
// fingerprint.
// InvalidArgument: no such table, or fewer than 100 answers of a provenance. FailedPrecondition: no setting answers
// within a point; the message names the best.
absl::StatusOr<engine::RecoveryProfile> ChooseRecovery(const nlohmann::json& table, int32_t num_layers);

}  // namespace spl::cli
