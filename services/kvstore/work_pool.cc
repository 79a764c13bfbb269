#include "services/kvstore/work_pool.h"

namespace spl::kvstore {

WorkPool::WorkPool(int num_threads, size_t capacity) : queue_(capacity) {
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] {
      for (;;) {
        // Closed and empty is the only lasting reason for nothing; anything else is the time-out.
        if (std::optional<std::function<void()>> task = queue_.Pop(std::chrono::seconds(1))) {
          (*task)();
        } else if (queue_.closed()) {
          return;
        }
      }
    });
  }
}

WorkPool::~WorkPool() { Stop(); }

void WorkPool::Stop() {
  queue_.Close();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace spl::kvstore
