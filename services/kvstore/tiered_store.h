// The store: memory in front of disk, write-behind between them, namespaces and pins over both.
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
  bool reset_damaged_index = false;  // see DiskTierOptions
  Watermarks watermarks;             // for both tiers
  // Limit of chunks that wait for the disk. If the queue is full, a new chunk stays in memory only and may be lost to
  // eviction.
  size_t write_queue_chunks = 4096;
  uint64_t write_queue_bytes = 256ull << 20;
  // Registers the memory tier for RMA. Borrowed. Null: plain memory.
  transport::KvTransport* transport = nullptr;
  bool require_registered = false;  // true: fail if memory cannot be registered
  const Clock* clock = &Clock::Real();
};

// First half of a put: a chunk that is admitted and has its room, but is not visible yet. Destroying it undoes the put.
struct PreparedPut {
  std::shared_ptr<ChunkRecord> record;
  chunk::ChunkHeader header;
  chunk::PutOptions options;
  std::optional<SlotBuffer> slot;  // nothing: the chunk is stored already

  std::byte* payload() const { return slot->data() + chunk::kEncodedHeaderBytes; }
  // DataLoss: the contents of the slot do not match the header.
  absl::Status Verify() const;
};

// Any thread may call. A published chunk never changes; readers hold references. Call Stop() before destruction, after
// all references are gone.
class TieredStore {
 public:
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(const TieredStoreOptions& options, Metrics& metrics);
  ~TieredStore();

  bool Contains(const chunk::ChunkKey& key);
  // Whether a Get would wait for the disk.
  bool IsOnlyOnDisk(const chunk::ChunkKey& key) {
    return disk_ != nullptr && FindLive(key) != nullptr && memory_tier_->Find(key, false) == nullptr &&
           writes_->Find(key) == nullptr;
  }
  // Null: a miss; a chunk whose namespace's TTL has passed is removed and counts as a miss. Waits for the disk if
  // memory does not have the chunk. Unavailable: the disk failed. With `in_region` the chunk lies in the registered
  // memory. ResourceExhausted: no room there.
  absl::StatusOr<StoredChunkRef> Get(const chunk::ChunkKey& key, bool in_region = false);

  // Verifies bytes that a Get has returned. If they have changed, drops them from memory and counts that once, however
  // many callers notice. True: do not use the bytes, even if another caller dropped them first; the disk may have a
  // good copy.
  bool DropIfDamaged(const StoredChunkRef& chunk);
  // The same for the copy in memory, if there is one.
  bool DropIfDamaged(const chunk::ChunkKey& key);

  // The two halves of a put. Neither waits for the disk.
  //
  // Prepare: with `in_region` the slot lies in the registered memory. ResourceExhausted: no room (larger than the
  // memory tier can hold, and no place in the write queue), or a quota, which the message names. NotFound: the
  // namespace is required and does not exist. FailedPrecondition: durable without a disk, or the key belongs to a
  // chunk of another model or layout.
  absl::StatusOr<PreparedPut> Prepare(const chunk::ChunkHeader& header, const chunk::PutOptions& options,
                                      bool in_region);
  enum class PutResult { kStored, kExisting };
  // Publish: the payload is in the slot and verified. ResourceExhausted: the write queue is full, and the chunk is
  // durable, hard-pinned or not in memory. After an OK, `durable` (may be null) runs once. With options.durable it runs
  // when the chunk is on disk and synced (OK), or cannot be; otherwise it runs before the return and says whether the
  // chunk is on disk. After an error it does not run.
  absl::StatusOr<PutResult> Publish(PreparedPut put, WriteBehind::Durable durable);
  // Both halves at once, for a payload that is verified.
  absl::StatusOr<PutResult> Put(const chunk::Chunk& chunk, const chunk::PutOptions& options = {},
                                WriteBehind::Durable durable = nullptr);

  NamespaceTable& namespaces() { return namespaces_; }
  // Ends the namespace and removes its chunks; returns its state at the end.
  absl::StatusOr<Namespace::Stat> DeleteNamespace(const chunk::Digest& id);
  struct Pinned {
    size_t num_changed = 0;
    size_t num_missing = 0;
  };
  absl::StatusOr<Pinned> SetPin(std::span<const chunk::ChunkKey> keys, chunk::Pin pin);
  // Pins all existing chunks and (as the namespace's setting) all new ones. NotFound: no such namespace.
  absl::StatusOr<Pinned> SetNamespacePin(const chunk::Digest& id, chunk::Pin pin);

  // Removes expired chunks and, every tenth time, saves counts of use. Call it about once a second.
  void Maintain();
  // Returns true when everything accepted is on disk, false at the deadline.
  bool Drain(std::chrono::steady_clock::time_point deadline);
  // Writes the queued chunks, joins the writer, saves counts of use.
  void Stop();

  bool has_disk() const { return disk_ != nullptr; }
  // Persistent storage for records. Null: no disk.
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
  // Returns the record if it is alive; removes a dead one from the tiers.
  std::shared_ptr<ChunkRecord> FindLive(const chunk::ChunkKey& key);
  size_t RemoveAll(const std::vector<std::shared_ptr<ChunkRecord>>& records);
  absl::StatusOr<Pinned> ApplyPin(const std::vector<std::shared_ptr<ChunkRecord>>& records, chunk::Pin pin);
  void Sweep();
  void OnBatch(const WriteBehind::Batch& batch);
  void UpdateGauges();

  const TieredStoreOptions options_;
  // Declared in order of dependence: slots point into the memory, records into the catalogue.
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
