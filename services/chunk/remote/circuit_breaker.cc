#include "services/chunk/remote/circuit_breaker.h"

#include <algorithm>
#include <utility>

namespace spl::chunk {

bool CircuitBreaker::closed() const {
  std::lock_guard lock(mutex_);
  return !open_;
}

bool CircuitBreaker::Succeeded() {
  std::lock_guard lock(mutex_);
  num_timeouts_ = 0;
  backoff_ = std::chrono::milliseconds(0);
  return std::exchange(open_, false);
}

bool CircuitBreaker::Failed(bool timed_out) {
  std::lock_guard lock(mutex_);
  if (!open_ && timed_out && ++num_timeouts_ < options_.timeouts_to_open) return false;
  backoff_ = std::clamp(backoff_ * 2, options_.min_backoff, options_.max_backoff);
  probe_at_ = clock_.Now() + backoff_;
  return !std::exchange(open_, true);
}

bool CircuitBreaker::TakeProbe() {
  std::lock_guard lock(mutex_);
  if (!open_ || clock_.Now() < probe_at_) return false;
  probe_at_ = clock_.Now() + options_.max_backoff;  // until the probe has failed or succeeded
  return true;
}

}  // namespace spl::chunk
