// The one source of CPU parallelism for kernels. Passed down in KernelContext; no kernel makes threads of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace spl::kernels {

// Owns num_threads - 1 workers; the caller of ParallelFor is the remaining thread. ParallelFor may be called by one
// thread at a time. A pool of 1 runs everything inline.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls body(task, thread) for every task in [0, num_tasks), each exactly once, and returns when all are done.
  // thread is in [0, num_threads()) and unique among the calls running at one time: index scratch memory by it.
  // Tasks are handed out in ascending order, so put the long ones first.
  void ParallelFor(int64_t num_tasks, const std::function<void(int64_t task, int thread)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spl::kernels
