// Threads for work that may wait for a disk, so that gRPC's own threads never do.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "services/base/bounded_queue.h"

namespace spl::kvstore {

// Runs tasks on `num_threads` threads. Stop() runs all accepted tasks, then joins.
class WorkPool {
 public:
  WorkPool(int num_threads, size_t capacity);
  ~WorkPool();
  // False: the queue is full or stopped; refuse the caller.
  [[nodiscard]] bool Submit(std::function<void()> task) { return queue_.TryPush(std::move(task)); }
  void Stop();

 private:
  BoundedQueue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace spl::kvstore
