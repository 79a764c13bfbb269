// Which workers are left alone for a while because calls to them keep failing, although they answer polls.
//
//   closed ── `failures_to_open` failures in a row ──► open ── after `open_time` ──► half open ── probe succeeds ──►
//   closed
//                                                       ▲                                │
//                                                       └──── probe fails: twice as long ┘
//
// Half open: one request at a time may go there.
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

// By worker id. Thread-safe; nothing blocks. Workers that have not failed take no memory.
class CircuitBreakers {
 public:
  using Clock = std::chrono::steady_clock;

  CircuitBreakers(const CircuitBreakerOptions& options, Metrics& metrics);

  // Workers that nothing may be sent to now: those open, and those half open whose probe is under way.
  std::set<std::string> Blocked(Clock::time_point now) const;
  // A request is sent there; a half-open worker then waits for what becomes of it.
  void OnSent(const std::string& worker_id, Clock::time_point now);
  void OnSuccess(const std::string& worker_id);
  // The worker's fault: it broke off, answered nonsense, failed inside. Not: it was full, or the request was wrong.
  void OnFailure(const std::string& worker_id, Clock::time_point now);
  // The request ended without a word about the worker (its client left, another worker failed).
  void OnNeither(const std::string& worker_id);
  // The worker was restarted or is gone: what its last life did counts no more.
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
