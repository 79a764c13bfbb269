#include "kernels/common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace spl::kernels {
namespace {

// How long a worker looks for the next call before it sleeps. A decode step makes hundreds of calls a few microseconds
// apart: sleeping in each gap would cost a wake-up (5 to 50 us) per call. 2000 pauses are about 100 us on Skylake and
// later (44 ns each), the most that an idle pool burns per step.
constexpr int kSpins = 2000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// One call is one "job". state_ packs the values that must change together: the job's number, whether it still takes
// workers, and how many are inside. A worker enters only an open job, so a worker that wakes late costs the caller
// nothing: the caller runs the tasks itself, closes the job, and waits only for workers inside.
struct ThreadPool::Impl {
  using Body = std::function<void(int64_t, int)>;
  static constexpr uint64_t kActiveOne = 1;
  static constexpr uint64_t kActiveMask = 0xffff;
  static constexpr uint64_t kOpen = 1u << 16;
  static constexpr uint64_t kJobOne = 1u << 17;

  explicit Impl(int num_threads) : num_threads(num_threads) {
    for (int t = 1; t < num_threads; ++t) workers.emplace_back([this, t] { Work(t); });
  }

  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& w : workers) w.join();
  }

  void Work(int thread) {
    uint64_t last = 0;
    while (WaitForJob(last)) {
      uint64_t s = state.load();
      if (!(s & kOpen)) {
        last = s / kJobOne;
        continue;
      }
      if (!state.compare_exchange_weak(s, s + kActiveOne)) continue;
      last = s / kJobOne;
      RunTasks(thread);
      state.fetch_sub(kActiveOne);
    }
  }

  // Returns when a job other than `last` was posted (it may be closed again), or false to stop.
  bool WaitForJob(uint64_t last) {
    for (int i = 0; i < kSpins; ++i) {
      if (state.load(std::memory_order_acquire) / kJobOne != last) return !stop.load();
      if (stop.load(std::memory_order_relaxed)) return false;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    ++sleepers;  // seq_cst, before the look at state: Post() stores state, then reads sleepers
    wake.wait(lock, [&] { return stop.load() || state.load() / kJobOne != last; });
    --sleepers;
    return !stop.load();
  }

  void RunTasks(int thread) {
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      (*body)(task, thread);
    }
  }

  void Run(int64_t tasks, const Body& b) {
    body = &b;
    num_tasks = tasks;
    next.store(0, std::memory_order_relaxed);
    state.store((state.load() / kJobOne + 1) * kJobOne | kOpen);
    if (sleepers.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      wake.notify_all();
    }
    RunTasks(0);
    state.fetch_and(~kOpen);
    for (int i = 0; state.load(std::memory_order_acquire) & kActiveMask; ++i) {
      if (i < kSpins) {
        Pause();
      } else {
        std::this_thread::yield();  // the worker is in a task or was descheduled in one
      }
    }
  }

  const int num_threads;
  std::vector<std::thread> workers;
  std::atomic<uint64_t> state{0};
  std::atomic<int64_t> next{0};
  const Body* body = nullptr;  // body and num_tasks: written between jobs, published by state
  int64_t num_tasks = 0;
  std::atomic<bool> stop{false};
  std::atomic<int> sleepers{0};
  std::mutex mutex;  // guards nothing but the sleep itself
  std::condition_variable wake;
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>(std::clamp(num_threads, 1, 1024))) {}
ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return impl_->num_threads; }

void ThreadPool::ParallelFor(int64_t num_tasks, const std::function<void(int64_t, int)>& body) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || impl_->num_threads == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
  impl_->Run(num_tasks, body);
}

}  // namespace spl::kernels
