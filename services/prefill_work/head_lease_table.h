// KV that a prefill worker keeps for a while after the push: the pages in the holes of local heads, which the decode
// worker lacks (docs/methods/provenance.md P5, 6.4).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/ids.h"
#include "services/engine/engine.h"

namespace spl::prefill {

// Shared ownership of the pages in the holes of some head streams. Immutable; the destructor releases the pages.
class LeasedHeads {
 public:
  struct Head {
    int32_t stream = 0;  // layer * num_kv_heads + head
    int32_t first_page = 0;
    std::vector<int32_t> pages;  // pages of the prefill worker's pool
  };
  // Shares the pages of every local head that has a hole and was not restored (`restored`: ascending streams). Null:
  // there are none. `channel_id`: the peer that may fetch them, over this channel only.
  static std::shared_ptr<const LeasedHeads> Share(const engine::SequenceKv& kv, const engine::StreamClasses& classes,
                                                  std::span<const int32_t> restored, uint64_t channel_id = 0);
  ~LeasedHeads();
  LeasedHeads(const LeasedHeads&) = delete;
  LeasedHeads& operator=(const LeasedHeads&) = delete;

  std::span<const Head> heads() const { return heads_; }  // ascending
  const Head* Find(int32_t stream) const;                 // null: not kept
  engine::PagePool& pool() const { return pool_; }
  uint64_t num_bytes() const;
  uint64_t channel_id() const { return channel_id_; }

 private:
  LeasedHeads(engine::PagePool& pool, uint64_t channel_id) : pool_(pool), channel_id_(channel_id) {}

  engine::PagePool& pool_;
  const uint64_t channel_id_;
  std::vector<Head> heads_;
};

struct HeadLeaseOptions {
  uint64_t max_bytes = 256ull << 20;  // limit of bytes under all leases; 0: no leases are given
  std::chrono::milliseconds ttl{20'000};
};

// Any thread may call. Pages return to the pool outside the lock, once the last fetch that reads them has ended.
class HeadLeaseTable {
 public:
  HeadLeaseTable(const HeadLeaseOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  // ResourceExhausted: the budget is used up. Unavailable: closed.
  absl::StatusOr<RandomId> Give(std::shared_ptr<const LeasedHeads> heads);
  // Extends the lease by ttl from now. NotFound: expired, released, reclaimed or never given.
  absl::StatusOr<std::shared_ptr<const LeasedHeads>> Renew(const RandomId& id);
  void Release(const RandomId& id);  // does nothing for an unknown lease
  // Ends the leases whose time is over; true if there were any. Renew treats them as ended even before.
  bool Expire();
  // Ends the lease that would expire first, to free its pages. False: there is none.
  bool ReclaimOne();
  void Close();  // ends all leases and gives no more

  std::chrono::milliseconds ttl() const { return options_.ttl; }
  struct Stats {
    uint64_t num_leases = 0, bytes = 0;                                          // now
    uint64_t num_given = 0, num_denied = 0, num_expired = 0, num_reclaimed = 0;  // since the start
  };
  Stats stats() const;

 private:
  struct Lease {
    std::shared_ptr<const LeasedHeads> heads;
    SteadyTime expires;
  };
  using Leases = std::unordered_map<RandomId, Lease, RandomIdHash>;
  std::shared_ptr<const LeasedHeads> TakeLocked(Leases::iterator lease);

  const HeadLeaseOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  Leases leases_;
  Stats stats_;
  bool closed_ = false;
};

}  // namespace spl::prefill
