#include "services/chunk/memory_chunk_store.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/chunk/chunk_header.h"

namespace spl::chunk {
namespace {

constexpr uint64_t kBytesPerShard = 64ull << 20;
constexpr uint64_t kShardsMax = 16;
// Header, list and map nodes of one entry.
constexpr uint64_t kEntryBytes = 512;

uint64_t CostOf(const Chunk& chunk) { return chunk.payload.size() + kEntryBytes; }

}  // namespace

struct MemoryChunkStore::Shard {
  using Order = std::list<std::shared_ptr<const Chunk>>;  // most recently used first

  std::mutex mutex;  // guards all below
  uint64_t capacity_bytes = 0;
  uint64_t bytes = 0;
  uint64_t num_evicted = 0;
  uint64_t num_corrupt = 0;
  Order order;
  std::unordered_map<ChunkKey, Order::iterator, ChunkKeyHash> index;

  void EraseLocked(Order::iterator entry) {
    bytes -= CostOf(**entry);
    index.erase((*entry)->header.key);
    order.erase(entry);
  }
};

MemoryChunkStore::MemoryChunkStore(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {
  const uint64_t num_shards = std::clamp<uint64_t>(capacity_bytes / kBytesPerShard, 1, kShardsMax);
  for (uint64_t i = 0; i < num_shards; ++i) {
    shards_.push_back(std::make_unique<Shard>());
    shards_.back()->capacity_bytes = capacity_bytes / num_shards;
  }
}

MemoryChunkStore::~MemoryChunkStore() = default;

MemoryChunkStore::Shard& MemoryChunkStore::ShardOf(const ChunkKey& key) const {
  // The map inside a shard uses the first bytes of the key, the choice of the shard another one.
  return *shards_[key.bytes[31] % shards_.size()];
}

std::shared_ptr<const Chunk> MemoryChunkStore::Find(const ChunkKey& key) {
  Shard& shard = ShardOf(key);
  std::lock_guard lock(shard.mutex);
  const auto found = shard.index.find(key);
  if (found == shard.index.end()) return nullptr;
  shard.order.splice(shard.order.begin(), shard.order, found->second);
  return *found->second;
}

bool MemoryChunkStore::Contains(const ChunkKey& key) const {
  Shard& shard = ShardOf(key);
  std::lock_guard lock(shard.mutex);
  return shard.index.count(key) != 0;
}

bool MemoryChunkStore::Insert(std::shared_ptr<const Chunk> chunk) {
  Shard& shard = ShardOf(chunk->header.key);
  const uint64_t cost = CostOf(*chunk);
  std::vector<std::shared_ptr<const Chunk>> evicted;  // freed after the lock
  std::lock_guard lock(shard.mutex);
  if (cost > shard.capacity_bytes) return false;
  if (shard.index.count(chunk->header.key) != 0) return true;
  while (shard.bytes + cost > shard.capacity_bytes) {
    evicted.push_back(shard.order.back());
    shard.EraseLocked(std::prev(shard.order.end()));
    ++shard.num_evicted;
  }
  const ChunkKey key = chunk->header.key;
  shard.order.push_front(std::move(chunk));
  shard.index.emplace(key, shard.order.begin());
  shard.bytes += cost;
  return true;
}

void MemoryChunkStore::Erase(const ChunkKey& key) {
  Shard& shard = ShardOf(key);
  std::lock_guard lock(shard.mutex);
  const auto found = shard.index.find(key);
  if (found != shard.index.end()) shard.EraseLocked(found->second);
}

absl::StatusOr<size_t> MemoryChunkStore::CountLeading(std::span<const ChunkKey> keys,
                                                      std::chrono::steady_clock::time_point) {
  size_t count = 0;
  while (count < keys.size() && Contains(keys[count])) ++count;
  return count;
}

absl::StatusOr<size_t> MemoryChunkStore::GetLeading(std::span<const ChunkKey> keys,
                                                    std::chrono::steady_clock::time_point deadline,
                                                    const std::function<bool(Chunk&&)>& sink) {
  size_t accepted = 0;
  for (const ChunkKey& key : keys) {
    if (std::chrono::steady_clock::now() >= deadline) break;
    const std::shared_ptr<const Chunk> chunk = Find(key);
    if (chunk == nullptr) break;
    if (!VerifyPayload(chunk->header, chunk->payload).ok()) {
      Erase(key);
      Shard& shard = ShardOf(key);
      std::lock_guard lock(shard.mutex);
      ++shard.num_corrupt;
      break;
    }
    if (!sink(Chunk(*chunk))) break;
    ++accepted;
  }
  return accepted;
}

absl::Status MemoryChunkStore::Put(std::span<const Chunk> chunks, std::chrono::steady_clock::time_point) {
  for (const Chunk& chunk : chunks) {
    SPLICE_RETURN_IF_ERROR(CheckHeaderFields(chunk.header));
    SPLICE_RETURN_IF_ERROR(VerifyPayload(chunk.header, chunk.payload));
    if (Contains(chunk.header.key)) continue;
    if (!Insert(std::make_shared<const Chunk>(chunk))) {
      return Errorf(absl::StatusCode::kResourceExhausted, "chunk {} of {} bytes is larger than the store's shard",
                    chunk.header.key.ToHex(), chunk.payload.size());
    }
  }
  return absl::OkStatus();
}

MemoryChunkStore::Stats MemoryChunkStore::stats() const {
  Stats total;
  for (const auto& shard : shards_) {
    std::lock_guard lock(shard->mutex);
    total.num_chunks += shard->index.size();
    total.bytes += shard->bytes;
    total.num_evicted += shard->num_evicted;
    total.num_corrupt += shard->num_corrupt;
  }
  return total;
}

}  // namespace spl::chunk
