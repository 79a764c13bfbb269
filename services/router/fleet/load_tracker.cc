#include "services/router/fleet/load_tracker.h"

#include <algorithm>
#include <utility>

namespace spl::router {

LoadTracker::Hold& LoadTracker::Hold::operator=(Hold&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  tracker_ = std::exchange(other.tracker_, nullptr);
  worker_id_ = std::move(other.worker_id_);
  load_ = other.load_;
  return *this;
}

void LoadTracker::Hold::Reset() {
  if (tracker_ == nullptr) return;
  {
    std::lock_guard lock(tracker_->mutex_);
    const auto it = tracker_->loads_.find(worker_id_);
    it->second.prefill_tokens -= load_.prefill_tokens;
    it->second.sequences -= load_.sequences;
    it->second.prefill_s = it->second.prefill_tokens == 0 ? 0 : std::max(0.0, it->second.prefill_s - load_.prefill_s);
    if (it->second.prefill_tokens == 0 && it->second.sequences == 0) tracker_->loads_.erase(it);
    if (load_.prefill_tokens > 0) tracker_->Remember(std::move(worker_id_), load_.prefill_tokens);
  }
  tracker_.reset();
}

LoadTracker::Hold LoadTracker::Add(const std::string& worker_id, const WorkerLoad& load) {
  Hold hold;
  if (load.prefill_tokens == 0 && load.sequences == 0) return hold;
  std::lock_guard lock(mutex_);
  WorkerLoad& total = loads_[worker_id];
  total.prefill_tokens += load.prefill_tokens;
  total.sequences += load.sequences;
  total.prefill_s += load.prefill_s;
  hold.tracker_ = shared_from_this();
  hold.worker_id_ = worker_id;
  hold.load_ = load;
  return hold;
}

void LoadTracker::Remember(std::string worker_id, uint64_t prefill_tokens) {
  const Clock::time_point now = Clock::now();
  while (!ended_.empty() && now - ended_.front().when > kRemembered) ended_.pop_front();
  ended_.push_back({now, std::move(worker_id), prefill_tokens});
}

uint64_t LoadTracker::PrefillTokensSince(const std::string& worker_id, Clock::time_point since) const {
  std::lock_guard lock(mutex_);
  const auto it = loads_.find(worker_id);
  uint64_t tokens = it == loads_.end() ? 0 : it->second.prefill_tokens;
  for (auto ended = ended_.rbegin(); ended != ended_.rend() && ended->when >= since; ++ended)
    if (ended->worker_id == worker_id) tokens += ended->prefill_tokens;
  return tokens;
}

WorkerLoad LoadTracker::Of(const std::string& worker_id) const {
  std::lock_guard lock(mutex_);
  const auto it = loads_.find(worker_id);
  return it == loads_.end() ? WorkerLoad() : it->second;
}

}  // namespace spl::router
