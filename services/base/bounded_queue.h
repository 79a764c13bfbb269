// A bounded multi-producer multi-consumer queue: the only way work crosses threads in Splice.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace spl {

// Owns its items. Any thread may call any method. After Close, pushes are refused; pops return the remaining items,
// then nothing.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // False: the queue is full or closed. The caller then refuses its own caller (RESOURCE_EXHAUSTED) and does not wait.
  [[nodiscard]] bool TryPush(T item) {
    {
      std::lock_guard lock(mutex_);
      if (closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
    return true;
  }

  std::optional<T> TryPop() {
    std::lock_guard lock(mutex_);
    return PopLocked();
  }

  // Waits at most `timeout`. Nothing: time-out, or closed and empty.
  std::optional<T> Pop(std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return closed_ || !items_.empty(); });
    return PopLocked();
  }

  void Close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  bool closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }
  size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }
  size_t capacity() const { return capacity_; }

 private:
  std::optional<T> PopLocked() {
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  const size_t capacity_;
  mutable std::mutex mutex_;  // guards items_, closed_
  std::condition_variable changed_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace spl
