// The router's guess of what each prefill worker has cached: what was routed there counts as present.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::router {

struct PrefixIndexOptions {
  size_t capacity = 262144;       // chunk keys in all; the least recently used go first (about 150 bytes each)
  std::chrono::seconds ttl{600};  // a guess older than this is worth nothing
};

// Maps chunk keys to the workers that were sent them. Thread-safe (one mutex; a lookup walks one prompt's keys).
// A wrong guess costs placement quality only: the prefill worker looks up what it really has.
class PrefixIndex {
 public:
  using Clock = std::chrono::steady_clock;

  explicit PrefixIndex(const PrefixIndexOptions& options) : options_(options) {}

  // Identifies one life of one worker: after a restart its cache is empty.
  struct Holder {
    std::string worker_id;
    uint64_t epoch = 0;
    bool operator==(const Holder&) const = default;
  };

  // For each holder the number of leading keys it is expected to have.
  std::vector<size_t> CountLeading(std::span<const chunk::ChunkKey> keys, std::span<const Holder> holders,
                                   Clock::time_point now);
  void Insert(std::span<const chunk::ChunkKey> keys, const Holder& holder, Clock::time_point now);
  size_t size() const;

 private:
  struct Presence {
    Holder holder;
    Clock::time_point expires;
  };
  struct Entry {
    std::vector<Presence> holders;  // as many as there are prefill workers, at most
    std::list<chunk::ChunkKey>::iterator age;
  };

  static bool Holds(const Entry& entry, const Holder& holder, Clock::time_point now);

  const PrefixIndexOptions options_;
  mutable std::mutex mutex_;  // guards the two below
  std::unordered_map<chunk::ChunkKey, Entry, chunk::ChunkKeyHash> entries_;
  std::list<chunk::ChunkKey> by_age_;  // most recently used first
};

}  // namespace spl::router
