// Keeps requests away from workers whose calls keep failing although they answer polls.
//
//   closed ── N failures in a row ──► open ── after `open_time` ──► half open ── probe succeeds ──► closed
//                                      ▲                                │
//                                      └──── probe fails: twice as long ┘
//
// N is failures_to_open. Half open: one request at a time may go there.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "services/base/metrics.h"

namespace spl::router {

struct CircuitBreakerOptions {
  int failures_to_open = 5;
  std::chrono::milliseconds open_time{1'000};  // the first time
  std::chrono::milliseconds open_time_max{30'000};
};

// By worker id. Thread-safe; never blocks. Workers that have not failed take no memory.
class CircuitBreakers {
 public:
  using Clock = std::chrono::steady_clock;

  CircuitBreakers(const CircuitBreakerOptions& options, Metrics& metrics);

  // Workers that must get no requests now: open ones, and half-open ones whose probe is running.
  std::set<std::string> Blocked(Clock::time_point now) const;
  // Call when a request is sent there; a half-open worker then waits for its outcome.
  void OnSent(const std::string& worker_id, Clock::time_point now);
  void OnSuccess(const std::string& worker_id);
  // Call for a fault of the worker: it broke off, answered nonsense, or failed inside. Not if it was full or the
  // request was wrong.
  void OnFailure(const std::string& worker_id, Clock::time_point now);
  // Call when the request ended without information about the worker (its client left, another worker failed).
  void OnNeither(const std::string& worker_id);
  // Call when the worker was restarted or is gone: failures of its last life no longer count.
  void Forget(const std::string& worker_id);

 private:
  struct State {
    int failures = 0;
    Clock::time_point open_until;  // zero: closed
    std::chrono::milliseconds open_time{0};
    bool probing = false;
    bool open() const { return open_until != Clock::time_point(); }
  };
  void CloseLocked(State& state);

  const CircuitBreakerOptions options_;
  prometheus::Gauge& open_gauge_;
  prometheus::Counter& opened_;
  mutable std::mutex mutex_;  // guards states_
  std::map<std::string, State> states_;
};

}  // namespace spl::router
