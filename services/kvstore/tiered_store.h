// The store itself: memory in front of disk, write-behind between them.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "services/base/bounded_queue.h"
#include "services/base/metrics.h"
#include "services/chunk/memory_chunk_store.h"
#include "services/kvstore/disk_tier.h"

namespace spl::kvstore {

struct TieredStoreOptions {
  uint64_t memory_bytes = 1ull << 30;
  std::string data_dir;  // empty: memory only
  uint64_t disk_bytes = 16ull << 30;
  // Chunks that wait for the disk. A full queue leaves a new chunk in memory only: it may be lost to eviction.
  size_t write_queue_chunks = 4096;
  uint64_t write_queue_bytes = 256ull << 20;
};

// Any thread may call. A published chunk never changes; readers hold references. Stop() before destruction.
class TieredStore {
 public:
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(const TieredStoreOptions& options, Metrics& metrics);
  ~TieredStore();

  bool Contains(const chunk::ChunkKey& key) const;
  // Null: a miss. Blocks on the disk when memory does not have it. Unavailable: the disk failed.
  absl::StatusOr<std::shared_ptr<const chunk::Chunk>> Get(const chunk::ChunkKey& key);
  enum class PutResult { kStored, kExisting };
  // `chunk` must be verified. Never waits for the disk. ResourceExhausted: larger than the memory tier can hold, and no
  // place in the write queue.
  absl::StatusOr<PutResult> Put(chunk::Chunk chunk);

  // Returns when everything accepted is on disk, or at the deadline (false).
  bool Drain(std::chrono::steady_clock::time_point deadline);
  // Writes what is queued and joins the writer.
  void Stop();

  struct Stats {
    chunk::MemoryChunkStore::Stats memory;
    DiskTier::Stats disk;
    uint64_t memory_capacity_bytes = 0;
    uint64_t disk_capacity_bytes = 0;
    uint64_t hits = 0;
    uint64_t misses = 0;
  };
  Stats stats() const;

 private:
  TieredStore(const TieredStoreOptions& options, Metrics& metrics);
  bool EnqueueWrite(const std::shared_ptr<const chunk::Chunk>& chunk);
  std::shared_ptr<const chunk::Chunk> FindPending(const chunk::ChunkKey& key) const;
  void WriteLoop();
  void WriteBatch(const std::vector<std::shared_ptr<const chunk::Chunk>>& batch);
  void UpdateGauges();

  const TieredStoreOptions options_;
  chunk::MemoryChunkStore memory_;
  std::unique_ptr<DiskTier> disk_;  // null without data_dir
  BoundedQueue<std::shared_ptr<const chunk::Chunk>> write_queue_;

  mutable std::mutex pending_mutex_;  // guards the next three
  std::condition_variable pending_changed_;
  std::unordered_map<chunk::ChunkKey, std::shared_ptr<const chunk::Chunk>, chunk::ChunkKeyHash> pending_;
  uint64_t pending_bytes_ = 0;
  std::thread writer_;

  struct Handles;
  const std::unique_ptr<Handles> metrics_;
};

}  // namespace spl::kvstore
