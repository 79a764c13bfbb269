// A few threads for work that is too long for I/O threads: parsing large bodies, tokenizing.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "services/base/bounded_queue.h"

namespace spl::router {

// Any thread may call TryPost. Stop (call it before destruction) runs the queued work and joins.
class WorkPool {
 public:
  WorkPool(int num_threads, size_t queue_capacity) : queue_(queue_capacity) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~WorkPool() { Stop(); }

  // False: the queue is full; refuse the caller.
  [[nodiscard]] bool TryPost(std::function<void()> work) { return queue_.TryPush(std::move(work)); }

  void Stop() {
    queue_.Close();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void Run() {
    while (true) {
      std::optional<std::function<void()>> work = queue_.Pop(std::chrono::seconds(1));
      if (work.has_value()) {
        (*work)();
      } else if (queue_.closed()) {
        return;
      }
    }
  }

  BoundedQueue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace spl::router
