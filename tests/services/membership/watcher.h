// Collects what a discovery says.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "services/membership/membership.h"

namespace spl::membership {

// A discovery that outlives it may go on calling: what is called stays.
class Watcher {
 public:
  Discovery::OnChange callback() {
    return [state = state_](const Members& members) {
      std::lock_guard lock(state->mutex);
      state->members = members;
      state->least = state->calls == 0 ? members.size() : std::min(state->least, members.size());
      ++state->calls;
      state->changed.notify_all();
    };
  }
  bool WaitFor(const std::function<bool(const Members&)>& done,
               std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, limit, [&] { return state_->calls > 0 && done(state_->members); });
  }
  bool WaitForSize(size_t size) {
    return WaitFor([size](const Members& m) { return m.size() == size; });
  }
  Members members() {
    std::lock_guard lock(state_->mutex);
    return state_->members;
  }
  // The shortest list since the last call of this.
  size_t TakeLeast() {
    std::lock_guard lock(state_->mutex);
    return std::exchange(state_->least, state_->members.size());
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    Members members;
    size_t calls = 0;
    size_t least = 0;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace spl::membership
