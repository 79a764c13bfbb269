#include "services/kvstore/read_leading.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace spl::kvstore {
namespace {

// One call of ReadLeading. Its threads take keys in order, each the next one.
class Reading {
 public:
  Reading(TieredStore& store, std::span<const chunk::ChunkKey> keys, uint64_t max_bytes)
      : store_(store), keys_(keys), max_bytes_(max_bytes), got_(keys.size(), StoredChunkRef()) {}

  // Until the end, or until a chunk that is only on the disk if `memory_only`.
  void Run(bool memory_only) {
    while (true) {
      const size_t i = next_.load();
      if (i >= keys_.size() || over_.load() || (memory_only && store_.IsOnlyOnDisk(keys_[i]))) return;
      size_t taken = i;
      if (next_.compare_exchange_strong(taken, i + 1)) Get(i);
    }
  }
  bool over() const { return over_.load() || next_.load() >= keys_.size(); }
  size_t num_left() const { return keys_.size() - next_.load(); }

  LeadingChunks Take() {
    LeadingChunks leading;
    uint64_t bytes = 0;
    for (absl::StatusOr<StoredChunkRef>& chunk : got_) {
      if (max_bytes_ != 0 && bytes >= max_bytes_) {
        leading.limited = true;
        break;
      }
      if (!chunk.ok()) leading.stopped = chunk.status();
      if (!chunk.ok() || *chunk == nullptr) break;
      bytes += (*chunk)->header.payload_bytes;
      leading.chunks.push_back(*std::move(chunk));
    }
    return leading;
  }

 private:
  void Get(size_t i) {
    got_[i] = store_.Get(keys_[i], true);
    const bool found = got_[i].ok() && *got_[i] != nullptr;
    const uint64_t bytes = found ? (*got_[i])->header.payload_bytes : 0;
    if (!found || (max_bytes_ != 0 && bytes_.fetch_add(bytes) + bytes >= max_bytes_)) over_ = true;
  }

  TieredStore& store_;
  const std::span<const chunk::ChunkKey> keys_;
  const uint64_t max_bytes_;
  std::vector<absl::StatusOr<StoredChunkRef>> got_;  // each written by one thread
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<bool> over_{false};
};

}  // namespace

LeadingChunks ReadLeading(TieredStore& store, std::span<const chunk::ChunkKey> keys, uint64_t max_bytes) {
  Reading reading(store, keys, max_bytes);
  reading.Run(true);
  std::vector<std::thread> helpers;
  if (!reading.over()) {
    const size_t count = std::min<size_t>(kReadersAtATime, reading.num_left());
    for (size_t i = 1; i < count; ++i) helpers.emplace_back([&] { reading.Run(false); });
    reading.Run(false);
  }
  for (std::thread& helper : helpers) helper.join();
  return reading.Take();
}

}  // namespace spl::kvstore
