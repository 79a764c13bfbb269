// Collects what a discovery says.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "services/membership/membership.h"

namespace spl::membership {

class Watcher {
 public:
  Discovery::OnChange callback() {
    return [this](const Members& members) {
      std::lock_guard lock(mutex_);
      members_ = members;
      least_ = calls_ == 0 ? members.size() : std::min(least_, members.size());
      ++calls_;
      changed_.notify_all();
    };
  }
  bool WaitFor(const std::function<bool(const Members&)>& done,
               std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return calls_ > 0 && done(members_); });
  }
  bool WaitForSize(size_t size) {
    return WaitFor([size](const Members& m) { return m.size() == size; });
  }
  Members members() {
    std::lock_guard lock(mutex_);
    return members_;
  }
  // The shortest list since the last call of this.
  size_t TakeLeast() {
    std::lock_guard lock(mutex_);
    return std::exchange(least_, members_.size());
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Members members_;
  size_t calls_ = 0;
  size_t least_ = 0;
};

}  // namespace spl::membership
