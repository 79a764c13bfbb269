#include "services/router/kb/kb_lookups.h"

#include <algorithm>
#include <utility>

namespace spl::router {

KbLookups::KbLookups(int num_threads, size_t max_waiting_per_caller)
    : max_running_per_caller_(std::max(1, num_threads / 2)), max_waiting_per_caller_(max_waiting_per_caller) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

bool KbLookups::TryPost(const chunk::Digest& caller, std::function<void()> work) {
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  Caller& own = callers_[caller];
  if (own.waiting.size() >= max_waiting_per_caller_) return false;
  own.waiting.push_back(std::move(work));
  changed_.notify_one();
  return true;
}

void KbLookups::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// The next caller after the last one, in the order of the map, that may begin something; end(): none.
KbLookups::Callers::iterator KbLookups::NextLocked() {
  auto it = callers_.upper_bound(last_);
  for (size_t i = 0; i < callers_.size(); ++i, ++it) {
    if (it == callers_.end()) it = callers_.begin();
    if (!it->second.waiting.empty() && it->second.num_running < max_running_per_caller_) return it;
  }
  return callers_.end();
}

void KbLookups::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    auto next = NextLocked();
    if (next == callers_.end()) {
      if (stopping_ && callers_.empty()) return;
      changed_.wait(lock);
      continue;
    }
    last_ = next->first;
    std::function<void()> work = std::move(next->second.waiting.front());
    next->second.waiting.pop_front();
    ++next->second.num_running;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    if (--next->second.num_running == 0 && next->second.waiting.empty()) callers_.erase(next);
    changed_.notify_all();  // the caller may begin something more, or all is done
  }
}

}  // namespace spl::router
