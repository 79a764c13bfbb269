#include "services/kvstore/memory_tier.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/kvstore/slab_file.h"

namespace spl::kvstore {

// A chunk that is on disk may leave the memory whatever its pin.
chunk::Pin MemoryTier::PinHere(const ChunkRecord& record) {
  return record.on_disk.load() ? chunk::Pin::kNone : record.pin.load();
}

StoredChunkRef MemoryTier::Find(const chunk::ChunkKey& key, bool touch) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return nullptr;
  Entry& entry = found->second;
  if (touch) entry.position = order_.Touch(entry.position, PinHere(*entry.chunk->record));
  return entry.chunk;
}

std::optional<SlotBuffer> MemoryTier::TakeSlot(uint64_t payload_bytes) {
  const uint64_t bytes = SlotBytesFor(payload_bytes);
  if (bytes > memory_.size()) return std::nullopt;
  const auto high = static_cast<uint64_t>(static_cast<double>(memory_.size()) * watermarks_.high);
  const auto low = static_cast<uint64_t>(static_cast<double>(memory_.size()) * watermarks_.low);
  if (const uint64_t used = memory_.used(); used + bytes > high && used > 0) {
    std::vector<StoredChunkRef> evicted;  // their slots come back outside the lock
    std::lock_guard lock(mutex_);
    EvictLocked(used + bytes - std::min(low, used + bytes), evicted);
  }
  for (;;) {
    if (std::optional<SlotBuffer> slot = memory_.Take(payload_bytes)) return slot;
    // Enough bytes are free perhaps, but not in one range: go on until there is one or nothing is left to evict.
    std::vector<StoredChunkRef> evicted;
    std::lock_guard lock(mutex_);
    if (EvictLocked(bytes, evicted) == 0) return std::nullopt;
  }
}

// At least `bytes` where possible; returns how many.
uint64_t MemoryTier::EvictLocked(uint64_t bytes, std::vector<StoredChunkRef>& evicted) {
  uint64_t freed = 0;
  for (auto at = order_.begin(); at != order_.end() && EvictionOrder::Evictable(at) && freed < bytes;) {
    const auto victim = at++;
    const auto found = entries_.find(victim->record->key);
    if (found->second.chunk.use_count() > 1) continue;  // new holders come from Find only, which waits for this lock
    freed += found->second.chunk->slot.size();
    order_.AgeTo(victim);
    order_.Remove(victim);
    evicted.push_back(std::move(found->second.chunk));
    entries_.erase(found);
    ++num_evicted_;
  }
  return freed;
}

bool MemoryTier::Insert(StoredChunkRef chunk) {
  SPLICE_CHECK(chunk->slot.in_region(), "the memory tier holds chunks of its region");
  std::lock_guard lock(mutex_);
  const auto [place, inserted] = entries_.try_emplace(chunk->header.key);
  if (!inserted) return false;
  place->second.position = order_.Add(*chunk->record, PinHere(*chunk->record));
  place->second.chunk = std::move(chunk);
  return true;
}

bool MemoryTier::Erase(const ChunkRecord& record) {
  StoredChunkRef erased;
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(record.key);
  if (found == entries_.end() || found->second.chunk->record.get() != &record) return false;
  order_.Remove(found->second.position);
  erased = std::move(found->second.chunk);
  entries_.erase(found);
  return true;
}

bool MemoryTier::EraseCopy(const StoredChunkRef& chunk) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(chunk->header.key);
  if (found == entries_.end() || found->second.chunk != chunk) return false;
  order_.Remove(found->second.position);
  entries_.erase(found);  // the caller still holds the bytes: their slot does not come back under the lock
  return true;
}

void MemoryTier::Reposition(const chunk::ChunkKey& key) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return;
  found->second.position = order_.SetPin(found->second.position, PinHere(*found->second.chunk->record));
}

MemoryTier::Stats MemoryTier::stats() const {
  std::lock_guard lock(mutex_);
  return {entries_.size(), memory_.used(), num_evicted_};
}

void MemoryTier::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  SPLICE_CHECK(order_.size() == entries_.size(), "every entry stands in the order once");
  uint64_t bytes = 0;
  for (const auto& named : entries_) {
    SPLICE_CHECK(named.second.position->record == named.second.chunk->record.get(), "the order points back");
    bytes += named.second.chunk->slot.size();
  }
  SPLICE_CHECK(bytes <= memory_.used(), "every chunk has its slot");
}

}  // namespace spl::kvstore
