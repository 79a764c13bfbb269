// A small thread that does one thing at regular intervals: gauges, polling, expiry.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace spl {

// Runs `body` every `period` until Stop(), which waits for a running body.
class Periodic {
 public:
  Periodic(std::chrono::milliseconds period, std::function<void()> body)
      : thread_([this, period, body = std::move(body)] {
          std::unique_lock lock(mutex_);
          while (!stopping_) {
            lock.unlock();
            body();
            lock.lock();
            changed_.wait_for(lock, period, [&] { return stopping_; });
          }
        }) {}
  ~Periodic() { Stop(); }

  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::mutex mutex_;  // guards stopping_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;  // last member: starts when the others exist
};

}  // namespace spl
