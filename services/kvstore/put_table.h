// Two-phase puts between their halves: memory that a peer writes and that is not readable yet.
#pragma once

#include <chrono>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/ids.h"
#include "services/kvstore/tiered_store.h"

namespace spl::kvstore {

struct PutTableOptions {
  std::chrono::milliseconds default_ttl{10'000};
  std::chrono::milliseconds max_ttl{60'000};
  uint64_t max_bytes = 0;  // limit of slot bytes, reserved and quarantined
  size_t max_reservations = 4096;
};

// A reservation ends in one of three ways. Committed: the writer has flushed, and its memory becomes chunks. Aborted by
// a writer that is quiet: the memory is free at once. Given up (it expired, or was aborted by a party that cannot speak
// for the writer): a late write may still arrive, so the memory is quarantined for one more ttl. The writer starts no
// piece later than its ttl less a second. A write that arrives even later damages a chunk, and readers detect that by
// its checksum (decision 0002). Any thread may call.
class PutTable {
 public:
  PutTable(const PutTableOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  struct Grant {
    RandomId id;
    std::chrono::milliseconds ttl{0};
  };
  // ResourceExhausted: too many bytes reserved or in quarantine, or too many reservations of any size.
  absl::StatusOr<Grant> Add(std::vector<PreparedPut> puts, std::chrono::milliseconds ttl);
  // Removes a reservation and returns it for the commit. NotFound: expired or unknown.
  absl::StatusOr<std::vector<PreparedPut>> Take(const RandomId& id);
  void Abort(const RandomId& id, bool writer_quiet);
  void Expire();  // call it regularly

  struct Stats {
    uint64_t num_reservations = 0;
    uint64_t reserved_bytes = 0;
    uint64_t quarantined_bytes = 0;
    uint64_t num_expired = 0;  // since the start
  };
  Stats stats() const;

 private:
  struct Reservation {
    std::vector<PreparedPut> puts;
    uint64_t bytes = 0;
    SteadyTime expires;
    std::chrono::milliseconds ttl{0};
  };
  struct Quarantined {
    std::vector<PreparedPut> puts;
    uint64_t bytes = 0;
    SteadyTime until;
  };
  void QuarantineLocked(Reservation reservation);

  const PutTableOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<RandomId, Reservation, RandomIdHash> reservations_;
  std::vector<Quarantined> quarantine_;
  uint64_t reserved_bytes_ = 0;
  uint64_t quarantined_bytes_ = 0;
  uint64_t num_expired_ = 0;
};

}  // namespace spl::kvstore
