// A few threads for the work of many callers: parsing, tokenizing. Each caller has its own queue and the queues take
// turns, so that one caller's backlog costs another at most one piece of work per turn.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace spl::router {

// Any thread may call TryPost. Stop (call it before destruction) runs the queued work and joins. Memory: the queued
// work; a caller with nothing waiting has no queue.
class FairPool {
 public:
  FairPool(int num_threads, size_t max_queued_each) : max_queued_each_(max_queued_each) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~FairPool() { Stop(); }

  // False: this caller's queue is full. Only this caller is refused.
  [[nodiscard]] bool TryPost(const std::string& caller, std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return false;
      auto [queue, is_new] = queues_.try_emplace(caller);
      if (queue->second.size() >= max_queued_each_) return false;
      queue->second.push_back(std::move(work));
      if (is_new) turns_.push_back(queue);
    }
    wake_.notify_one();
    return true;
  }

  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  using Queues = std::map<std::string, std::deque<std::function<void()>>>;

  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopped_ || !turns_.empty(); });
      if (turns_.empty()) return;
      const Queues::iterator queue = turns_.front();
      turns_.pop_front();
      const std::function<void()> work = std::move(queue->second.front());
      queue->second.pop_front();
      if (queue->second.empty()) {
        queues_.erase(queue);
      } else {
        turns_.push_back(queue);
      }
      lock.unlock();
      work();
      lock.lock();
    }
  }

  const size_t max_queued_each_;
  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable wake_;
  Queues queues_;                      // callers with waiting work
  std::list<Queues::iterator> turns_;  // the same callers; next turn first
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace spl::router
