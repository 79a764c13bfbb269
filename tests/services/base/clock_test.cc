#include "services/base/clock.h"

#include <gtest/gtest.h>

#include <thread>

namespace spl {
namespace {

using std::chrono::seconds;

TEST(FakeClock, StandsStillUntilAdvanced) {
  FakeClock clock;
  const SteadyTime start = clock.Now();
  const WallTime wall_start = clock.WallNow();
  EXPECT_EQ(clock.Now(), start);
  clock.Advance(seconds(5));
  EXPECT_EQ(clock.Now() - start, seconds(5));
  EXPECT_EQ(clock.WallNow() - wall_start, seconds(5));
}

TEST(FakeClock, WaitEndsWhenItsDeadlineIsReached) {
  FakeClock clock;
  std::mutex mutex;
  std::condition_variable changed;
  const SteadyTime deadline = clock.Now() + seconds(30);
  std::thread advancer([&] { clock.Advance(seconds(60)); });
  std::unique_lock lock(mutex);
  EXPECT_FALSE(clock.WaitUntil(lock, changed, deadline, [] { return false; }));
  advancer.join();
}

TEST(FakeClock, WaitEndsWhenItsConditionHolds) {
  FakeClock clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::thread setter([&] {
    std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  });
  {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(clock.WaitUntil(lock, changed, clock.Now() + seconds(30), [&] { return done; }));
  }
  setter.join();
}

TEST(RealClock, WaitTimesOut) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  const Clock& clock = Clock::Real();
  const SteadyTime deadline = clock.Now() + std::chrono::milliseconds(5);
  EXPECT_FALSE(clock.WaitUntil(lock, changed, deadline, [] { return false; }));
  EXPECT_GE(clock.Now(), deadline);
}

}  // namespace
}  // namespace spl
