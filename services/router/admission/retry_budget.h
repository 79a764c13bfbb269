// Limits all retries of the router: a cluster in which many requests fail must not get several times as many.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

namespace spl::router {

struct RetryBudgetOptions {
  double per_request = 0.2;  // retries that every new request adds to the budget …
  double per_second = 10;    // … and every second, so that a quiet router can retry too
  double most = 1000;        // size of the budget, full at the start: one lost worker's requests all move at once
};

// A bucket of retries. Thread-safe.
class RetryBudget {
 public:
  using Clock = std::chrono::steady_clock;

  explicit RetryBudget(const RetryBudgetOptions& options) : options_(options), left_(options.most) {}

  void OnRequest(Clock::time_point now) {
    std::lock_guard lock(mutex_);
    FillLocked(now);
    left_ = std::min(options_.most, left_ + options_.per_request);
  }
  // False: the budget is used up, and the request ends with its error.
  bool TakeRetry(Clock::time_point now) {
    std::lock_guard lock(mutex_);
    FillLocked(now);
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }

 private:
  void FillLocked(Clock::time_point now) {
    if (now > filled_ && filled_ != Clock::time_point()) {
      left_ =
          std::min(options_.most, left_ + options_.per_second * std::chrono::duration<double>(now - filled_).count());
    }
    filled_ = std::max(filled_, now);
  }

  const RetryBudgetOptions options_;
  std::mutex mutex_;  // guards the rest
  double left_;
  Clock::time_point filled_;
};

}  // namespace spl::router
