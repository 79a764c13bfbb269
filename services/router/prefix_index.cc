#include "services/router/prefix_index.h"

#include <algorithm>

namespace spl::router {

bool PrefixIndex::Holds(const Entry& entry, const Holder& holder, Clock::time_point now) {
  return std::any_of(entry.holders.begin(), entry.holders.end(),
                     [&](const Presence& p) { return p.holder == holder && p.expires > now; });
}

std::vector<size_t> PrefixIndex::CountLeading(std::span<const chunk::ChunkKey> keys, std::span<const Holder> holders,
                                              Clock::time_point now) {
  std::vector<size_t> leading(holders.size(), 0);
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto it = entries_.find(keys[i]);
    if (it == entries_.end()) break;
    bool held = false;
    for (size_t h = 0; h < holders.size(); ++h) {
      if (leading[h] != i || !Holds(it->second, holders[h], now)) continue;
      leading[h] = i + 1;
      held = true;
    }
    if (!held) break;
    by_age_.splice(by_age_.begin(), by_age_, it->second.age);
  }
  return leading;
}

void PrefixIndex::Insert(std::span<const chunk::ChunkKey> keys, const Holder& holder, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  for (const chunk::ChunkKey& key : keys) {
    const auto [it, added] = entries_.try_emplace(key);
    Entry& entry = it->second;
    if (added) {
      by_age_.push_front(key);
      entry.age = by_age_.begin();
    } else {
      by_age_.splice(by_age_.begin(), by_age_, entry.age);
    }
    // A worker is in the list once: an earlier life of it, and what has expired, makes room.
    std::erase_if(entry.holders,
                  [&](const Presence& p) { return p.holder.worker_id == holder.worker_id || p.expires <= now; });
    entry.holders.push_back({holder, now + options_.ttl});
  }
  while (entries_.size() > options_.capacity) {
    entries_.erase(by_age_.back());
    by_age_.pop_back();
  }
}

size_t PrefixIndex::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace spl::router
