// Numbered log of what the prefix and segment caches have gained and lost, for the routers that watch them.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::prefill {

// Keeps the last `capacity` events and the keys present now, of which there are as many as the two caches have chunks.
// Thread-safe. The engine reports from inside its indexes, so nothing here waits or calls out.
class CacheEvents {
 public:
  explicit CacheEvents(size_t capacity = 65'536) : capacity_(capacity) {}

  void Report(bool stored, std::span<const chunk::ChunkKey> keys);

  struct Event {
    bool stored = false;
    chunk::ChunkKey key;
  };
  // Returns events from number `next` on, at most `max`. False: they are forgotten or do not exist; start over with a
  // snapshot.
  bool Read(uint64_t next, size_t max, std::vector<Event>* events) const;
  // Returns the keys present now, and the number of the first event that they do not include.
  uint64_t Snapshot(std::vector<chunk::ChunkKey>* keys) const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards the rest
  std::deque<Event> events_;
  uint64_t first_ = 1;  // number of events_.front()
  std::unordered_set<chunk::ChunkKey, chunk::ChunkKeyHash> present_;
};

}  // namespace spl::prefill
