// What the store knows of every chunk, whichever tier holds its bytes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/chunk/chunk.h"
#include "services/kvstore/disk_index.h"
#include "services/kvstore/namespace_table.h"

namespace spl::kvstore {

// Which KV a payload is: what its reader must have in common with it. Shared by the records of one model.
struct ModelIdentity {
  chunk::Digest model_fingerprint{};
  chunk::Digest layout_digest{};
  auto operator<=>(const ModelIdentity&) const = default;
};

// Held by whoever holds the chunk or room for it: tiers, the write queue, leases, reservations. The last one to let go
// gives the chunk's share of its namespace's quota back. Any thread may read and change the atomics.
struct ChunkRecord {
  chunk::ChunkKey key;
  std::shared_ptr<Namespace> owner;
  const ModelIdentity* model = nullptr;  // of the catalogue; null: stored by the first version, which kept none
  uint64_t payload_bytes = 0;
  uint64_t created_ms = 0;  // Unix time
  float cost_seconds = 0;   // to compute it again
  std::atomic<chunk::Pin> pin{chunk::Pin::kNone};
  std::atomic<uint32_t> uses{0};  // reads, not counting the put
  std::atomic<bool> on_disk{false};

  bool Live(uint64_t now_ms) const { return owner->Serves(created_ms, now_ms); }
};

// The price of a chunk whose writer named none: tokens at 10,000 a second, and attention doubling the price of a token
// at position 16,384. Only the proportions between chunks matter.
float EstimateCost(const chunk::ChunkHeader& header);

// Records by key. Any thread may call. Must outlive every record.
class ChunkCatalog {
 public:
  ChunkCatalog(NamespaceTable& namespaces, const Clock& clock);

  // The record of a chunk to be stored, charged to its namespace, or the living one that the key has already (its pin
  // is raised to what `options` ask for). NotFound, ResourceExhausted: as Namespace and NamespaceTable say;
  // FailedPrecondition naming both: the key is taken by a chunk of another model or page layout.
  absl::StatusOr<std::shared_ptr<ChunkRecord>> Admit(const chunk::ChunkHeader& header,
                                                     const chunk::PutOptions& options);
  // A record as it was before a restart; its quota is not enforced.
  std::shared_ptr<ChunkRecord> Restore(const IndexEntry& row);
  // Null when nobody holds the chunk. It may be dead.
  std::shared_ptr<ChunkRecord> Find(const chunk::ChunkKey& key) const;
  // Every record for which `wanted` holds; shard by shard, so that others wait at most for a 64th of the scan.
  std::vector<std::shared_ptr<ChunkRecord>> Select(const std::function<bool(const ChunkRecord&)>& wanted) const;

  // Unix time as it was when the store started, and what has passed since by the steady clock: a wall clock that jumps
  // forward while the store runs expires nothing.
  uint64_t NowMs() const;

 private:
  struct Place {
    std::weak_ptr<ChunkRecord> record;
    const ChunkRecord* address;  // tells a successor under the same key from the record that ends
  };
  struct Shard {
    mutable std::mutex mutex;  // guards places; a leaf: nothing is locked and no record ends under it
    std::unordered_map<chunk::ChunkKey, Place, chunk::ChunkKeyHash> places;
  };

  std::shared_ptr<ChunkRecord> Make(const chunk::ChunkKey& key, std::shared_ptr<Namespace> owner,
                                    uint64_t payload_bytes, const ModelIdentity& model);
  const ModelIdentity* Intern(const ModelIdentity& model);
  void Forget(const ChunkRecord& record);
  Shard& ShardOf(const chunk::ChunkKey& key) const { return shards_[key.bytes[31] % shards_.size()]; }

  NamespaceTable& namespaces_;
  const Clock& clock_;
  const SteadyTime start_;
  const WallTime start_wall_;
  mutable std::array<Shard, 64> shards_;
  std::mutex models_mutex_;         // guards models_
  std::set<ModelIdentity> models_;  // a few: only ever grows
};

}  // namespace spl::kvstore
