// What the caches of prefixes and segments have gained and lost, in order and numbered, for the routers that watch.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::prefill {

// Keeps the last `capacity` events, and the keys that are there now: as many as the two caches have chunks.
// Thread-safe; the engine reports from inside its indexes, so nothing here waits or calls out.
class CacheEvents {
 public:
  explicit CacheEvents(size_t capacity = 65'536) : capacity_(capacity) {}

  void Report(bool stored, std::span<const chunk::ChunkKey> keys);

  struct Event {
    bool stored = false;
    chunk::ChunkKey key;
  };
  // Events from number `next` on, at most `max`. False: they are forgotten, or there were never as many; start over
  // with a snapshot.
  bool Read(uint64_t next, size_t max, std::vector<Event>* events) const;
  // What is there now, and the number of the first event that it does not contain.
  uint64_t Snapshot(std::vector<chunk::ChunkKey>* keys) const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards the rest
  std::deque<Event> events_;
  uint64_t first_ = 1;  // number of events_.front()
  std::unordered_set<chunk::ChunkKey, chunk::ChunkKeyHash> present_;
};

}  // namespace spl::prefill
