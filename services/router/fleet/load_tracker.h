// Load that this router has sent to each worker and not yet seen finished. Between two polls it is the only truth: a
// request that was routed and has not arrived yet is load.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace spl::router {

struct WorkerLoad {
  uint64_t prefill_tokens = 0;
  uint32_t sequences = 0;
  double prefill_s = 0;  // expected time to prefill them; 0: unknown
};

// Thread-safe.
class LoadTracker : public std::enable_shared_from_this<LoadTracker> {
 public:
  using Clock = std::chrono::steady_clock;

  // Ended holds are remembered this long: longer than any poll takes (FleetOptions).
  static constexpr std::chrono::seconds kRemembered{2};

  // Counts while it lives. Movable; releases once.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept { *this = std::move(other); }
    Hold& operator=(Hold&& other) noexcept;
    ~Hold() { Reset(); }
    void Reset();

   private:
    friend class LoadTracker;
    std::shared_ptr<LoadTracker> tracker_;
    std::string worker_id_;
    WorkerLoad load_;
  };

  Hold Add(const std::string& worker_id, const WorkerLoad& load);
  WorkerLoad Of(const std::string& worker_id) const;
  // At least as many prefill tokens as there were at any moment since then: those of now, and those whose holds have
  // ended since. Cost: the holds that ended within kRemembered.
  uint64_t PrefillTokensSince(const std::string& worker_id, Clock::time_point since) const;

 private:
  void Remember(std::string worker_id, uint64_t prefill_tokens);  // holds mutex_

  struct Ended {
    Clock::time_point when;
    std::string worker_id;
    uint64_t prefill_tokens;
  };
  mutable std::mutex mutex_;  // guards all below
  std::deque<Ended> ended_;   // by time
  // Looked up several times per worker in every placement decision.
  absl::flat_hash_map<std::string, WorkerLoad> loads_;
};

}  // namespace spl::router
