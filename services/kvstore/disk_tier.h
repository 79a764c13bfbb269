// Chunks on disk: an index in RocksDB, payloads in slab files. Every read is verified.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/kvstore/chunk_catalog.h"
#include "services/kvstore/disk_index.h"
#include "services/kvstore/eviction_order.h"
#include "services/kvstore/memory_tier.h"
#include "services/kvstore/slab_file.h"
#include "services/kvstore/stored_chunk.h"

namespace spl::kvstore {

struct DiskTierOptions {
  std::string dir;
  // Limit of slab files, without file headers and the index. The chunks least worth keeping make room.
  uint64_t capacity_bytes = 0;
  Watermarks watermarks;
  // Moves a damaged index aside as index.damaged-<Unix ms>; the tier then starts without chunks, namespaces and
  // records.
  bool reset_damaged_index = false;
};

// Owns the directory (one process at a time). Any thread may call Read and Contains; Write runs one call at a time (it
// locks).
//
// Crash safety: a chunk is written and synced before its index entry; the entry of an evicted chunk is removed before
// its slot is used again. After kill -9 every entry therefore names a slot with that chunk. After a power cut a removed
// entry may be back; Read then finds another key in the slot and drops the entry. Counts of use and priorities are
// written from time to time (FlushUsage), so the order of eviction is approximately the same after a restart.
class DiskTier {
 public:
  // Puts the records and namespaces that it finds into the catalogue and the table; borrows both. FailedPrecondition:
  // the directory is in use or has another format version. DataLoss: the index is unreadable and reset_damaged_index is
  // off. A damaged slab file costs its chunks, not the start.
  static absl::StatusOr<std::unique_ptr<DiskTier>> Open(const DiskTierOptions& options, ChunkCatalog& catalog,
                                                        NamespaceTable& namespaces);
  ~DiskTier();

  NamespaceStorage& namespace_storage() { return *index_; }
  RecordStorage& record_storage() { return *index_; }

  bool Contains(const chunk::ChunkKey& key) const;
  // Reads into a slot that `take_slot` gives for a payload size (nothing: ResourceExhausted). Null: not stored, or
  // damaged and therefore dropped and counted. Unavailable: the disk failed; nothing is dropped.
  using TakeSlotFn = std::function<std::optional<SlotBuffer>(uint64_t payload_bytes)>;
  absl::StatusOr<StoredChunkRef> Read(const chunk::ChunkKey& key, const TakeSlotFn& take_slot);
  // Moves a chunk back in the order of eviction after a use, here or in memory; the caller has counted the use in the
  // record.
  void Touch(const chunk::ChunkKey& key);
  // Removes these records, but not successors that have taken their keys since. Running reads finish.
  absl::Status Remove(std::span<const std::shared_ptr<ChunkRecord>> records);
  // Applies changed pins to the order of eviction; syncs those of chunks on disk.
  absl::Status SavePins(std::span<const chunk::ChunkKey> keys);
  // Writes counts of use and priorities of at most `max_entries` chunks used since the last write. Cost: one unsynced
  // batch of the index per 256 chunks.
  absl::Status FlushUsage(size_t max_entries);
  // Group commit: one sync per touched file and one of the index, for many chunks. Skips chunks that exist. Leaves out
  // and counts chunks that do not fit or that the disk refuses; the others are stored regardless.
  struct WriteResult {
    absl::Status status;  // the first failure. ResourceExhausted: no room even after eviction; Unavailable: the disk
    size_t num_failed = 0;
  };
  WriteResult Write(std::span<const StoredChunkRef> chunks);

  struct Stats {
    uint64_t num_chunks = 0;
    uint64_t bytes = 0;  // used slots
    uint64_t num_evicted = 0;
    uint64_t num_corrupt = 0;
    uint64_t num_index_resets = 0;  // 1: reset at this start
  };
  Stats stats() const;
  uint64_t capacity_bytes() const { return options_.capacity_bytes; }

  // Aborts if the counters and free lists disagree with the entries. For tests.
  void CheckInvariants() const;

 private:
  struct Slab {
    std::unique_ptr<SlabFile> file;
    std::vector<uint64_t> free_backed;   // have blocks on disk
    std::vector<uint64_t> free_punched;  // have no blocks
  };
  struct Entry {
    std::shared_ptr<ChunkRecord> record;
    SlotRef slot;
    uint64_t sequence = 0;
    int num_readers = 0;
    bool indexed = true;      // false: dropped while a read of its slot was running
    bool used_since = false;  // used since its row was written: listed in used_
    EvictionOrder::Position position;
  };

  DiskTier(DiskTierOptions options, ChunkCatalog& catalog) : options_(std::move(options)), catalog_(catalog) {}
  absl::Status CheckVersionFile();
  absl::Status SetIndexAside(const absl::Status& cause);
  struct Written {
    std::shared_ptr<ChunkRecord> record;
    IndexEntry row;
  };
  static absl::StatusOr<uint64_t> GrowUpTo(SlabFile& file, uint64_t num_slots);
  absl::Status WriteSome(std::span<const StoredChunkRef> chunks, size_t& num_taken);
  absl::Status Commit(const std::vector<Written>& written);
  absl::Status OpenSlabs();
  absl::Status LoadIndex(NamespaceTable& namespaces);
  absl::StatusOr<Slab*> SlabFor(uint64_t slot_bytes);         // mutex_ held
  absl::StatusOr<SlotRef> TakeSlot(uint64_t slot_bytes);      // mutex_ held
  bool TakeFree(Slab& slab, uint64_t& slot);                  // mutex_ held
  absl::Status MakeRoom(uint64_t slot_bytes);                 // mutex_ held
  absl::Status EvictForMore(uint64_t slot_bytes);             // mutex_ held
  absl::Status EvictUntil(uint64_t used_bytes_max);           // mutex_ held
  absl::Status Trim();                                        // mutex_ held
  void ReleaseFree(uint64_t bytes_wanted, const Slab* keep);  // mutex_ held
  void FreeSlot(const SlotRef& slot);                         // mutex_ held
  void Publish(const Written& written, bool restored);        // mutex_ held
  void Unlink(const std::shared_ptr<Entry>& entry);           // mutex_ held
  void TouchLocked(Entry& entry);                             // mutex_ held
  absl::StatusOr<StoredChunkRef> ReadSlot(const Entry& entry, const SlabFile& file, const TakeSlotFn& take_slot);
  void EndRead(const std::shared_ptr<Entry>& entry, bool corrupt);
  std::string SlabPath(uint64_t slot_bytes) const;

  const DiskTierOptions options_;
  ChunkCatalog& catalog_;
  std::unique_ptr<DiskIndex> index_;
  std::mutex write_mutex_;  // one Write at a time; taken before mutex_

  mutable std::mutex mutex_;        // guards all below; never held during payload I/O
  std::map<uint64_t, Slab> slabs_;  // by slot_bytes; slabs are never removed
  std::unordered_map<chunk::ChunkKey, std::shared_ptr<Entry>, chunk::ChunkKeyHash> entries_;
  EvictionOrder order_;
  std::deque<chunk::ChunkKey> used_;  // keys whose rows are out of date, oldest first; bounded
  uint64_t used_bytes_ = 0;           // slots that hold a chunk, or are being read or written
  uint64_t backed_bytes_ = 0;         // used and free_backed slots
  uint64_t next_sequence_ = 1;
  uint64_t num_evicted_ = 0;
  uint64_t num_corrupt_ = 0;
  uint64_t num_index_resets_ = 0;
};

}  // namespace spl::kvstore
