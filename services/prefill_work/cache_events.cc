#include "services/prefill_work/cache_events.h"

#include <algorithm>

namespace spl::prefill {

void CacheEvents::Report(bool stored, std::span<const chunk::ChunkKey> keys) {
  std::lock_guard lock(mutex_);
  for (const chunk::ChunkKey& key : keys) {
    const bool changed = stored ? present_.insert(key).second : present_.erase(key) > 0;
    if (!changed) continue;
    events_.push_back({stored, key});
    if (events_.size() <= capacity_) continue;
    events_.pop_front();
    ++first_;
  }
}

bool CacheEvents::Read(uint64_t next, size_t max, std::vector<Event>* events) const {
  events->clear();
  std::lock_guard lock(mutex_);
  if (next < first_ || next > first_ + events_.size()) return false;
  const size_t begin = static_cast<size_t>(next - first_), end = std::min(events_.size(), begin + max);
  events->assign(events_.begin() + static_cast<ptrdiff_t>(begin), events_.begin() + static_cast<ptrdiff_t>(end));
  return true;
}

uint64_t CacheEvents::Snapshot(std::vector<chunk::ChunkKey>* keys) const {
  std::lock_guard lock(mutex_);
  keys->assign(present_.begin(), present_.end());
  return first_ + events_.size();
}

}  // namespace spl::prefill
