#include "services/base/clock.h"

namespace spl {
namespace {

class RealClock final : public Clock {
 public:
  SteadyTime Now() const override { return std::chrono::steady_clock::now(); }
  WallTime WallNow() const override { return std::chrono::system_clock::now(); }
  bool WaitUntil(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, SteadyTime deadline,
                 const std::function<bool()>& done) const override {
    return changed.wait_until(lock, deadline, done);
  }
};

}  // namespace

const Clock& Clock::Real() {
  static const RealClock clock;
  return clock;
}

SteadyTime FakeClock::Now() const { return SteadyTime(std::chrono::nanoseconds(now_ns_.load())); }

WallTime FakeClock::WallNow() const {
  return WallTime(std::chrono::duration_cast<WallTime::duration>(std::chrono::nanoseconds(now_ns_.load())));
}

bool FakeClock::WaitUntil(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, SteadyTime deadline,
                          const std::function<bool()>& done) const {
  // Advance cannot know which mutex guards `done`, so a waiter looks at the fake time again every millisecond.
  while (!done()) {
    if (Now() >= deadline) return done();
    changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  return true;
}

void FakeClock::Advance(std::chrono::nanoseconds by) { now_ns_.fetch_add(by.count()); }

}  // namespace spl
