// Chunks that are accepted and not yet on disk: a queue with one writer, which commits in groups.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "services/base/bounded_queue.h"
#include "services/kvstore/disk_tier.h"
#include "services/kvstore/stored_chunk.h"

namespace spl::kvstore {

struct WriteBehindOptions {
  size_t max_chunks = 4096;
  uint64_t max_bytes = 256ull << 20;
};

// Owns the writer thread. Any thread may call. Call Stop() before destruction; it writes all accepted chunks.
class WriteBehind {
 public:
  // `on_batch` runs on the writer after each group commit, before the durable callbacks of its chunks.
  struct Batch {
    std::span<const StoredChunkRef> chunks;
    DiskTier::WriteResult result;
    double seconds = 0;
  };
  WriteBehind(DiskTier& disk, const WriteBehindOptions& options, std::function<void(const Batch&)> on_batch);
  ~WriteBehind();

  // False: full or stopped. `durable` (may be null) runs once, on the writer. OK: the chunk is on disk and synced;
  // otherwise the reason why it is not. A chunk that already waits is not queued again.
  using Durable = std::function<void(absl::Status)>;
  [[nodiscard]] bool Push(const StoredChunkRef& chunk, Durable durable);
  // Returns a queued chunk. Null: none.
  StoredChunkRef Find(const chunk::ChunkKey& key) const;
  size_t size() const;

  // Returns true when all accepted chunks have been handled, false at the deadline.
  bool Drain(std::chrono::steady_clock::time_point deadline);
  void Stop();

 private:
  struct Pending {
    StoredChunkRef chunk;
    std::vector<Durable> durable;
  };
  void Loop();
  void WriteBatch(const std::vector<StoredChunkRef>& batch);

  DiskTier& disk_;
  const WriteBehindOptions options_;
  const std::function<void(const Batch&)> on_batch_;
  BoundedQueue<StoredChunkRef> queue_;
  mutable std::mutex mutex_;  // guards the next two
  std::condition_variable changed_;
  std::unordered_map<chunk::ChunkKey, Pending, chunk::ChunkKeyHash> pending_;
  uint64_t pending_bytes_ = 0;
  std::thread writer_;
};

}  // namespace spl::kvstore
