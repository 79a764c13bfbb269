// The chunks most worth keeping, in memory.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include "services/kvstore/eviction_order.h"
#include "services/kvstore/stored_chunk.h"

namespace spl::kvstore {

struct Watermarks {
  // A write that would fill a tier beyond `high` first evicts down to `low`, which makes room for many chunks at once.
  double high = 0.95;
  double low = 0.90;
};

// Indexes chunks whose slots lie in the payload memory, and makes room there. A chunk that a reader, a lease or the
// write queue also holds is not evicted: its memory would not become free. Any thread may call.
class MemoryTier {
 public:
  MemoryTier(PayloadMemory& memory, Watermarks watermarks) : memory_(memory), watermarks_(watermarks) {}

  // Null: not here. `touch` counts as a use in the order of eviction; the caller has counted it in the record.
  StoredChunkRef Find(const chunk::ChunkKey& key, bool touch);
  // Returns room for a payload; evicts if necessary. Nothing: larger than the memory, or all else is held or pinned.
  std::optional<SlotBuffer> TakeSlot(uint64_t payload_bytes);
  // `chunk.slot` must lie in the region. False: the key is here already and keeps its chunk.
  bool Insert(StoredChunkRef chunk);
  // Erases this chunk, not a successor under its key. False: it is not here.
  bool Erase(const ChunkRecord& record);
  // Erases exactly these bytes, not a copy of the chunk that was read from the disk since. False: they are not here.
  bool EraseCopy(const StoredChunkRef& chunk);
  // Call when the chunk's pin has changed, or when it has reached the disk.
  void Reposition(const chunk::ChunkKey& key);

  struct Stats {
    uint64_t num_chunks = 0;
    uint64_t bytes = 0;  // slots, including those of readers and reservations
    uint64_t num_evicted = 0;
  };
  Stats stats() const;
  void CheckInvariants() const;

 private:
  struct Entry {
    StoredChunkRef chunk;
    EvictionOrder::Position position;
  };
  static chunk::Pin PinHere(const ChunkRecord& record);
  uint64_t EvictLocked(uint64_t bytes, std::vector<StoredChunkRef>& evicted);

  PayloadMemory& memory_;
  const Watermarks watermarks_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<chunk::ChunkKey, Entry, chunk::ChunkKeyHash> entries_;
  EvictionOrder order_;
  uint64_t num_evicted_ = 0;
};

}  // namespace spl::kvstore
