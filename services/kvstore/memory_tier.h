// Chunks in memory, most worth keeping.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include "services/kvstore/eviction_order.h"
#include "services/kvstore/stored_chunk.h"

namespace spl::kvstore {

struct Watermarks {
  // What would fill a tier beyond `high` first evicts down to `low`: room is made for many chunks at once.
  double high = 0.95;
  double low = 0.90;
};

// Indexes chunks whose slots lie in the payload memory, and makes room there. A chunk that somebody else holds (a
// reader, a lease, the write queue) is not evicted: its memory would not become free. Any thread may call.
class MemoryTier {
 public:
  MemoryTier(PayloadMemory& memory, Watermarks watermarks) : memory_(memory), watermarks_(watermarks) {}

  // Null: not here. `touch`: it is being used; the caller has counted that in the record.
  StoredChunkRef Find(const chunk::ChunkKey& key, bool touch);
  // Room for a payload, made by eviction where need be. Nothing: larger than the memory, or all else is held or pinned.
  std::optional<SlotBuffer> TakeSlot(uint64_t payload_bytes);
  // `chunk.slot` lies in the region. A key that is here keeps its chunk: false.
  bool Insert(StoredChunkRef chunk);
  // That chunk, not one that has taken its key since. False: it is not here.
  bool Erase(const ChunkRecord& record);
  // These very bytes, not a copy of the chunk that was read from the disk since. False: they are not here.
  bool EraseCopy(const StoredChunkRef& chunk);
  // Its pin changed, or it has reached the disk.
  void Reposition(const chunk::ChunkKey& key);

  struct Stats {
    uint64_t num_chunks = 0;
    uint64_t bytes = 0;  // of slots, those of readers and reservations included
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
