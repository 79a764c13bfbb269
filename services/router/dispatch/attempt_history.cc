#include "services/router/dispatch/attempt_history.h"

#include <algorithm>

namespace spl::router {

void AttemptHistory::NoteBreakOff(const std::string& worker_id, uint64_t epoch, Clock::time_point now) {
  suspects_.push_back({worker_id, epoch, now});
}

AttemptHistory::Kills AttemptHistory::CountKills(const Fleet& fleet) const {
  Kills kills;
  for (const Suspect& suspect : suspects_) {
    const Fleet::Fate fate = fleet.FateOf(suspect.worker_id, suspect.epoch, suspect.since);
    kills.lost += fate == Fleet::Fate::kLost;
    kills.unknown += fate == Fleet::Fate::kUnknown;
  }
  return kills;
}

bool AttemptHistory::HasFreshPair(const FleetSnapshot& fleet, uint64_t num_tokens) const {
  const auto fresh = [&](const auto& worker) { return !failed.contains(worker.worker_id); };
  const auto fresh_and_short_enough = [&](const PrefillView& p) {
    return fresh(p) && num_tokens <= p.local->max_new_tokens;
  };
  return std::any_of(fleet.decode.begin(), fleet.decode.end(), fresh) &&
         (std::any_of(fleet.prefill.begin(), fleet.prefill.end(), fresh) ||
          std::any_of(fleet.local.begin(), fleet.local.end(), fresh_and_short_enough));
}

}  // namespace spl::router
