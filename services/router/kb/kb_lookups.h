// Threads for requests that wait for a store to describe a knowledge base, so that no other request waits with them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::router {

// Callers take turns; one alone never uses more than half of the threads. Any thread may call.
class KbLookups {
 public:
  KbLookups(int num_threads, size_t max_waiting_per_caller);
  ~KbLookups() { Stop(); }

  // False: the caller's queue is full, or Stop was called.
  [[nodiscard]] bool TryPost(const chunk::Digest& caller, std::function<void()> work);
  // Runs the waiting work and joins. Idempotent; one thread at a time.
  void Stop();

 private:
  struct Caller {
    std::deque<std::function<void()>> waiting;
    int num_running = 0;
  };
  using Callers = std::map<chunk::Digest, Caller>;  // those with work

  void Run();
  Callers::iterator NextLocked();

  const int max_running_per_caller_;
  const size_t max_waiting_per_caller_;
  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable changed_;
  Callers callers_;
  chunk::Digest last_{};  // caller of the last turn
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace spl::router
