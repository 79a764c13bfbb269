// What others than this router have waiting at the prefill workers. A poll's count is old by the time of a decision,
// but most of it is this router's own, of which it knows every moment: only the rest has to be taken from the poll.
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
  // Call when a poll has brought news: compares each worker's new count with what this router has there now. A count
  // that did not change is taken for the old one.
  void Update(std::shared_ptr<const FleetSnapshot> fleet, const LoadTracker& loads);

  // Tokens, one per place of the fleet (FleetSnapshot::place); null when `fleet` is not the snapshot of the last
  // Update.
  std::shared_ptr<const std::vector<uint64_t>> Of(const FleetSnapshot& fleet) const;

 private:
  struct Seen {
    uint64_t epoch = 0;
    uint64_t queued_tokens = 0;
    uint64_t foreign_tokens = 0;
  };
  mutable std::mutex mutex_;          // guards all below
  std::map<std::string, Seen> seen_;  // by worker_id, of the last snapshot
  std::shared_ptr<const FleetSnapshot> fleet_;
  std::shared_ptr<const std::vector<uint64_t>> tokens_;
};

}  // namespace spl::router
