// Time, injected wherever it decides something, so that tests order events instead of waiting for them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace spl {

using SteadyTime = std::chrono::steady_clock::time_point;
using WallTime = std::chrono::system_clock::time_point;

// Nanoseconds since 1970 by the machine's clock, for values that go to other machines.
inline int64_t UnixNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Safe from any thread.
class Clock {
 public:
  virtual ~Clock() = default;

  virtual SteadyTime Now() const = 0;    // for deadlines and durations
  virtual WallTime WallNow() const = 0;  // for values that people read and that outlive the process

  // Waits on `changed` until done() is true or Now() reaches `deadline`; returns done(). `lock` is held on entry, on
  // return, and whenever done() runs.
  virtual bool WaitUntil(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, SteadyTime deadline,
                         const std::function<bool()>& done) const = 0;

  static const Clock& Real();
};

// A clock that stands still until Advance. Now() starts one hour after the epoch, so that "ten minutes ago" is
// positive.
class FakeClock final : public Clock {
 public:
  SteadyTime Now() const override;
  WallTime WallNow() const override;
  bool WaitUntil(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, SteadyTime deadline,
                 const std::function<bool()>& done) const override;

  void Advance(std::chrono::nanoseconds by);

 private:
  std::atomic<int64_t> now_ns_{3'600'000'000'000};
};

}  // namespace spl
