// The failed attempts of one request: which workers it avoids, and whether it may be the request that kills them.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "services/router/fleet/fleet.h"
#include "services/router/fleet/snapshot.h"

namespace spl::router {

// One thread at a time.
class AttemptHistory {
 public:
  using Clock = std::chrono::steady_clock;

  uint32_t attempts = 0;              // prefills started
  uint32_t failures = 0;              // attempts that ended before prefill answered
  uint32_t migrations = 0;            // moves to another decode worker after it did
  std::set<std::string> full;         // decode workers that had no room since the last wait
  std::set<std::string> failed;       // workers that failed this request
  Clock::time_point none_since = {};  // no pair of workers can take the request since; epoch: one can

  // The worker broke off while it worked on this request. The fleet knows later whether it is lost.
  void NoteBreakOff(const std::string& worker_id, uint64_t epoch, Clock::time_point now);

  struct Kills {
    uint32_t lost = 0;     // workers of which the fleet knows that they are lost
    uint32_t unknown = 0;  // workers of which it does not know yet
  };
  Kills CountKills(const Fleet& fleet) const;
  Clock::time_point last_break_off() const { return suspects_.back().since; }  // after one was noted

  // True when there is a pair of workers neither of which has failed this request. `num_tokens`: prompt and answer.
  bool HasFreshPair(const FleetSnapshot& fleet, uint64_t num_tokens) const;

 private:
  struct Suspect {
    std::string worker_id;
    uint64_t epoch = 0;
    Clock::time_point since;
  };
  std::vector<Suspect> suspects_;
};

}  // namespace spl::router
