// Stops asking a peer that does not answer.
#pragma once

#include <chrono>
#include <mutex>

#include "services/base/clock.h"

namespace spl::chunk {

struct CircuitBreakerOptions {
  int timeouts_to_open = 2;  // in a row; a refused or lost connection opens at once
  std::chrono::milliseconds min_backoff{500};
  std::chrono::milliseconds max_backoff{30'000};  // doubled with every failed probe up to here
};

// Closed: calls go out. Open: they do not; a prober, not a request, tries again after the backoff. Any thread may call.
class CircuitBreaker {
 public:
  CircuitBreaker(const CircuitBreakerOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  bool closed() const;
  // True when that closed it.
  bool Succeeded();
  // `timed_out`: no answer within the caller's time, which may have been short. True when that opened it.
  bool Failed(bool timed_out);
  // Open, and the backoff is over: true once for each probe.
  bool TakeProbe();

 private:
  const CircuitBreakerOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  bool open_ = false;
  int num_timeouts_ = 0;
  std::chrono::milliseconds backoff_{0};
  SteadyTime probe_at_;
};

}  // namespace spl::chunk
