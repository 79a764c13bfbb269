// Read leases: chunks that stay in place while a peer copies them.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/ids.h"
#include "services/kvstore/stored_chunk.h"

namespace spl::kvstore {

struct LeaseOptions {
  std::chrono::milliseconds default_ttl{10'000};
  std::chrono::milliseconds max_ttl{60'000};
  std::chrono::milliseconds max_life{600'000};  // limit with renewals: chunks under lease cannot be evicted
  uint64_t max_bytes = 0;  // limit of payload bytes under all leases; a single lease is granted whatever its size
  size_t max_leases = 16'384;
};

// A lease holds references to chunks. A referenced chunk is not evicted, and its memory is not reused. Deleting its
// namespace makes it a miss at once and frees its memory when the lease ends. Any thread may call.
class LeaseTable {
 public:
  LeaseTable(const LeaseOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  struct Grant {
    RandomId id;
    std::chrono::milliseconds ttl{0};
  };
  // `ttl` 0: the default; longer ones are cut to the limit. ResourceExhausted: too many bytes under lease, or too many
  // leases.
  absl::StatusOr<Grant> Take(std::vector<StoredChunkRef> chunks, std::chrono::milliseconds ttl);
  // Extends the lease, until max_life after Take at most. NotFound: expired, released, or never given.
  absl::StatusOr<std::chrono::milliseconds> Renew(const RandomId& id, std::chrono::milliseconds ttl);
  // Returns those of `keys` whose chunks the lease holds, each once; none for an unknown lease.
  std::vector<chunk::ChunkKey> HeldOf(const RandomId& id, std::span<const chunk::ChunkKey> keys) const;
  void Release(const RandomId& id);  // does nothing for an unknown lease
  void Expire();                     // ends leases whose time is over; call it regularly

  struct Stats {
    uint64_t num_leases = 0;
    uint64_t bytes = 0;
    uint64_t num_expired = 0;  // since the start; their readers came too late
  };
  Stats stats() const;

 private:
  struct Lease {
    std::vector<StoredChunkRef> chunks;
    uint64_t bytes = 0;
    SteadyTime expires, ends;
  };
  std::chrono::milliseconds Clamp(std::chrono::milliseconds ttl) const;

  const LeaseOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<RandomId, Lease, RandomIdHash> leases_;
  uint64_t bytes_ = 0;
  uint64_t num_expired_ = 0;
};

}  // namespace spl::kvstore
