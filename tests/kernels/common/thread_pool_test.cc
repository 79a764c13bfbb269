#include "kernels/common/thread_pool.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(ThreadPool, RunsEveryTaskOnceAndReturnsWhenAllAreDone) {
  Random random(91);
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int round = 0; round < 300; ++round) {
      std::vector<int> runs(random.Int(0, 200), 0);  // plain ints: the pool must order them before its return
      pool.ParallelFor(static_cast<int64_t>(runs.size()), [&](int64_t task, int) { ++runs[task]; });
      ASSERT_EQ(std::accumulate(runs.begin(), runs.end(), 0), static_cast<int>(runs.size()));
      for (int r : runs) ASSERT_EQ(r, 1);
    }
  }
}

TEST(ThreadPool, ThreadNumbersAreUniqueAmongRunningTasks) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  std::vector<std::atomic<int>> inside(kThreads);
  std::atomic<bool> clash{false};
  for (int round = 0; round < 200; ++round) {
    pool.ParallelFor(64, [&](int64_t, int thread) {
      ASSERT_GE(thread, 0);
      ASSERT_LT(thread, kThreads);
      if (inside[thread].fetch_add(1) != 0) clash = true;
      inside[thread].fetch_sub(1);
    });
  }
  EXPECT_FALSE(clash);
}

// Each of two tasks waits for the other: passes only when two threads really run at once.
TEST(ThreadPool, TasksRunConcurrently) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  std::atomic<bool> timed_out{false};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  pool.ParallelFor(2, [&](int64_t, int) {
    ++arrived;
    while (arrived < 2 && !timed_out) {
      if (std::chrono::steady_clock::now() > deadline) timed_out = true;
      std::this_thread::yield();
    }
  });
  EXPECT_FALSE(timed_out);
}

// Workers fall asleep after their spin; a call after any pause must wake them or do without, never hang or lose a task.
TEST(ThreadPool, WorksAfterIdlePausesOfAnyLength) {
  ThreadPool pool(3);
  for (int pause_us = 0; pause_us < 2000; pause_us += 40) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(pause_us);
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
    std::atomic<int> count{0};
    pool.ParallelFor(5, [&](int64_t, int) { ++count; });
    ASSERT_EQ(count, 5);
  }
}

TEST(ThreadPool, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

}  // namespace
}  // namespace spl::kernels
