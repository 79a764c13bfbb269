// Stops calls to a peer that does not answer.
#pragma once

#include <chrono>
#include <mutex>

#include "services/base/clock.h"

namespace spl::chunk {

struct CircuitBreakerOptions {
  int timeouts_to_open = 2;  // in a row; a refused or lost connection opens it at once
  std::chrono::milliseconds min_backoff{500};
  std::chrono::milliseconds max_backoff{30'000};  // doubles with every failed probe, up to this
};

// Closed: calls are made. Open: none are made; after the backoff a prober, not a request, tries again. Any thread may
// call.
class CircuitBreaker {
 public:
  CircuitBreaker(const CircuitBreakerOptions& options, const Clock& clock) : options_(options), clock_(clock) {}

  bool closed() const;
  // True: this success closed the breaker.
  bool Succeeded();
  // `timed_out`: no answer within the caller's time, which may have been short. True: this failure opened the breaker.
  bool Failed(bool timed_out);
  // True if the breaker is open and the backoff is over; once for each probe.
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
