// Tokens that other routers have waiting at the prefill workers. A poll's count is old by the time of a decision, but
// most of it is this router's own load, which it knows at every moment: only the rest must be taken from the poll.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "services/router/fleet/load_tracker.h"
#include "services/router/fleet/snapshot.h"

namespace spl::router {

// Thread-safe.
class ForeignLoad {
 public:
  // Call when a poll has brought news: compares each worker's new count with this router's load there since the poll
  // was sent, for the count is of some moment since: a prompt that it counts may have ended when the answer is read. An
  // unchanged count is treated as the old one.
  void Update(std::shared_ptr<const FleetSnapshot> fleet, const LoadTracker& loads);

  // Returns tokens, one per place of the fleet (FleetSnapshot::place). For another snapshot than that of the last
  // Update they are those of the last Update, and what the snapshot counts for workers that it did not know.
  std::shared_ptr<const std::vector<uint64_t>> Of(const FleetSnapshot& fleet) const;

 private:
  struct Seen {
    uint64_t epoch = 0;
    uint64_t queued_tokens = 0;
    uint64_t foreign_tokens = 0;
  };
  mutable std::mutex mutex_;          // guards all below
  std::map<std::string, Seen> seen_;  // by worker_id, from the last snapshot
  std::shared_ptr<const FleetSnapshot> fleet_;
  std::shared_ptr<const std::vector<uint64_t>> tokens_;
};

}  // namespace spl::router
