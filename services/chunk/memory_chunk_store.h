// Chunks in memory; evicts the least recently used first.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::chunk {

// Owns its chunks. A published chunk never changes, so readers hold references that outlive eviction. Any thread may
// call. Sharded by key, one shard per 64 MiB, at most 16: LRU order and the byte limit hold per shard.
class MemoryChunkStore final : public ChunkStore {
 public:
  explicit MemoryChunkStore(uint64_t capacity_bytes);
  ~MemoryChunkStore() override;

  absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys,
                                      std::chrono::steady_clock::time_point deadline) override;
  absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys, std::chrono::steady_clock::time_point deadline,
                                    const std::function<bool(Chunk&&)>& sink) override;
  absl::Status Put(std::span<const Chunk> chunks, std::chrono::steady_clock::time_point deadline) override;

  // Null: not stored. Counts as a use. Does not verify; callers that pass the bytes on do.
  std::shared_ptr<const Chunk> Find(const ChunkKey& key);
  bool Contains(const ChunkKey& key) const;
  // False: the chunk alone is larger than its shard. A key that exists keeps its chunk.
  bool Insert(std::shared_ptr<const Chunk> chunk);
  void Erase(const ChunkKey& key);

  struct Stats {
    uint64_t num_chunks = 0;
    uint64_t bytes = 0;  // payloads plus the cost of entries
    uint64_t num_evicted = 0;
    uint64_t num_corrupt = 0;
  };
  Stats stats() const;
  uint64_t capacity_bytes() const { return capacity_bytes_; }

 private:
  struct Shard;
  Shard& ShardOf(const ChunkKey& key) const;

  const uint64_t capacity_bytes_;
  std::vector<std::unique_ptr<Shard>> shards_;
};

}  // namespace spl::chunk
