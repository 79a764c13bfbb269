// The store itself: memory in front of disk, write-behind between them, namespaces and pins over both.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/metrics.h"
#include "services/kvstore/chunk_catalog.h"
#include "services/kvstore/disk_tier.h"
#include "services/kvstore/memory_tier.h"
#include "services/kvstore/namespace_table.h"
#include "services/kvstore/payload_memory.h"
#include "services/kvstore/write_behind.h"

namespace spl::kvstore {

struct TieredStoreOptions {
  uint64_t memory_bytes = 1ull << 30;
  std::string data_dir;  // empty: memory only
  uint64_t disk_bytes = 16ull << 30;
  bool reset_damaged_index = false;  // as DiskTierOptions says
  Watermarks watermarks;             // of both tiers
  // Chunks that wait for the disk. A full queue leaves a new chunk in memory only: it may be lost to eviction.
  size_t write_queue_chunks = 4096;
  uint64_t write_queue_bytes = 256ull << 20;
  // Registers the memory tier for RMA; null: plain memory. Borrowed.
  transport::KvTransport* transport = nullptr;
  bool require_registered = false;  // no plain memory when it cannot be registered
  const Clock* clock = &Clock::Real();
};

// First half of a put: a chunk that is admitted and has its room, but that nobody can see. Dropping it takes it back.
struct PreparedPut {
  std::shared_ptr<ChunkRecord> record;
  chunk::ChunkHeader header;
  chunk::PutOptions options;
  std::optional<SlotBuffer> slot;  // none: the chunk is stored already

  std::byte* payload() const { return slot->data() + chunk::kEncodedHeaderBytes; }
  // DataLoss: what stands in the slot is not what the header says.
  absl::Status Verify() const;
};

// Any thread may call. A published chunk never changes; readers hold references. Stop() before destruction, after every
// reference is gone.
class TieredStore {
 public:
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(const TieredStoreOptions& options, Metrics& metrics);
  ~TieredStore();

  bool Contains(const chunk::ChunkKey& key);
  // Null: a miss; so is a chunk whose namespace's TTL has passed, which is removed. Blocks on the disk when memory does
  // not have it. Unavailable: the disk failed. With `in_region` the chunk stands in the registered memory, or
  // ResourceExhausted when there is no room for it.
  absl::StatusOr<StoredChunkRef> Get(const chunk::ChunkKey& key, bool in_region = false);

  // Looks at these bytes, which a Get has given, and when they have changed drops them from memory, counted once
  // however many look. True: they are not to be used, even when somebody else dropped them first; the disk may have a
  // good copy.
  bool DropIfDamaged(const StoredChunkRef& chunk);
  // The same for the copy in memory, if there is one.
  bool DropIfDamaged(const chunk::ChunkKey& key);

  // The two halves of a put. Neither waits for the disk. Prepare: ResourceExhausted: no room (larger than the memory
  // tier can hold and no place in the write queue), or a quota, which it names; NotFound: the namespace is required and
  // does not exist; FailedPrecondition: durable without a disk, or the key belongs to a chunk of another model or
  // layout. With `in_region` the slot lies in the registered memory.
  absl::StatusOr<PreparedPut> Prepare(const chunk::ChunkHeader& header, const chunk::PutOptions& options,
                                      bool in_region);
  enum class PutResult { kStored, kExisting };
  // The payload is in the slot and verified. ResourceExhausted: durable, pinned hard or not in memory, and the write
  // queue is full. After an OK, `durable` (may be null) runs once: with options.durable
  // when the chunk is on disk, synced (OK), or cannot be; otherwise before the return, and says whether it is. After an
  // error it does not run.
  absl::StatusOr<PutResult> Publish(PreparedPut put, WriteBehind::Durable durable);
  // Both at once, for a payload that is verified.
  absl::StatusOr<PutResult> Put(const chunk::Chunk& chunk, const chunk::PutOptions& options = {},
                                WriteBehind::Durable durable = nullptr);

  NamespaceTable& namespaces() { return namespaces_; }
  // Ends the namespace and removes its chunks; what it had when it ended.
  absl::StatusOr<Namespace::Stat> DeleteNamespace(const chunk::Digest& id);
  struct Pinned {
    size_t num_changed = 0;
    size_t num_missing = 0;
  };
  absl::StatusOr<Pinned> SetPin(std::span<const chunk::ChunkKey> keys, chunk::Pin pin);
  // All chunks there are, and (as the namespace's setting) all to come. NotFound.
  absl::StatusOr<Pinned> SetNamespacePin(const chunk::Digest& id, chunk::Pin pin);

  // Removes what has expired and, every tenth time, saves counts of use. To be called every second or so.
  void Maintain();
  // Returns when everything accepted is on disk, or at the deadline (false).
  bool Drain(std::chrono::steady_clock::time_point deadline);
  // Writes what is queued, joins the writer, saves counts of use.
  void Stop();

  bool has_disk() const { return disk_ != nullptr; }
  // Where records outlive the process; null without a disk.
  RecordStorage* record_storage() { return disk_ == nullptr ? nullptr : &disk_->record_storage(); }
  const PayloadMemory& memory() const { return *memory_; }

  struct Stats {
    MemoryTier::Stats memory;
    DiskTier::Stats disk;
    uint64_t memory_capacity_bytes = 0;
    uint64_t disk_capacity_bytes = 0;
    uint64_t hits = 0;
    uint64_t misses = 0;
    uint64_t num_expired = 0;
    uint64_t num_corrupt = 0;  // dropped from either tier
    uint64_t write_queue_chunks = 0;
  };
  Stats stats() const;
  void CheckInvariants() const;

 private:
  TieredStore(const TieredStoreOptions& options, Metrics& metrics);
  bool Visible(const chunk::ChunkKey& key) const;
  absl::StatusOr<StoredChunkRef> ReadDisk(const chunk::ChunkKey& key, bool in_region);
  StoredChunkRef MoveToRegion(const StoredChunkRef& chunk);
  // The record when it lives; a dead one is removed from the tiers.
  std::shared_ptr<ChunkRecord> FindLive(const chunk::ChunkKey& key);
  size_t RemoveAll(const std::vector<std::shared_ptr<ChunkRecord>>& records);
  absl::StatusOr<Pinned> ApplyPin(const std::vector<std::shared_ptr<ChunkRecord>>& records, chunk::Pin pin);
  void Sweep();
  void OnBatch(const WriteBehind::Batch& batch);
  void UpdateGauges();

  const TieredStoreOptions options_;
  // In order of dependence: slots point into the memory, records into the catalogue.
  std::unique_ptr<PayloadMemory> memory_;
  NamespaceTable namespaces_;
  ChunkCatalog catalog_;
  std::unique_ptr<MemoryTier> memory_tier_;
  std::unique_ptr<DiskTier> disk_;  // null without data_dir
  std::unique_ptr<WriteBehind> writes_;
  std::atomic<uint64_t> num_maintained_{0};
  std::atomic<uint64_t> num_damaged_in_memory_{0};

  struct Handles;
  const std::unique_ptr<Handles> metrics_;
};

}  // namespace spl::kvstore
