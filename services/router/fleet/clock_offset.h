// Offset of another program's clock from ours, measured as in NTP (RFC 5905 section 8): the other clock is read between
// two readings of ours, so the offset is known to within half the time between these.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace spl::router {

struct ClockOffset {
  double seconds = 0;  // theirs minus ours
  double bound_s = 0;  // the true value is at most this far away
};

// The estimate for one peer. Not thread-safe.
class ClockEstimate {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `theirs` was read between `asked` and `answered`; `ours` at `answered`. Nanoseconds since 1970.
  void Observe(int64_t theirs_unix_ns, int64_t ours_unix_ns, Time asked, Time answered) {
    const double bound_s = std::chrono::duration<double>(answered - asked).count() / 2;
    const ClockOffset seen{static_cast<double>(theirs_unix_ns - ours_unix_ns) / 1e9 + bound_s, bound_s};
    // The quickest answer is the most precise, but clocks drift: it counts for a minute.
    if (best_.has_value() && seen.bound_s > best_->bound_s && answered - best_at_ < std::chrono::minutes(1)) return;
    best_ = seen;
    best_at_ = answered;
  }
  const std::optional<ClockOffset>& best() const { return best_; }

 private:
  std::optional<ClockOffset> best_;
  Time best_at_{};
};

}  // namespace spl::router
