// The store's knowledge of every chunk, whichever tier holds its bytes.
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

// Identity of the model behind a payload: its reader must have the same. Shared by the records of one model.
struct ModelIdentity {
  chunk::Digest model_fingerprint{};
  chunk::Digest layout_digest{};
  auto operator<=>(const ModelIdentity&) const = default;
};

// Shared by everything that holds the chunk or room for it: tiers, the write queue, leases, reservations. When the last
// reference goes, the chunk's share of its namespace's quota is released. Any thread may read and change the atomics.
struct ChunkRecord {
  chunk::ChunkKey key;
  std::shared_ptr<Namespace> owner;
  // owned by the catalogue; null: stored by the first version, which recorded none
  const ModelIdentity* model = nullptr;
  uint64_t payload_bytes = 0;
  uint64_t created_ms = 0;  // Unix time
  float cost_seconds = 0;   // seconds to compute it again
  std::atomic<chunk::Pin> pin{chunk::Pin::kNone};
  std::atomic<uint32_t> uses{0};  // reads, not counting the put
  std::atomic<bool> on_disk{false};

  bool Live(uint64_t now_ms) const { return owner->Serves(created_ms, now_ms); }
};

// Cost of a chunk whose writer gave none: 10,000 tokens a second, and attention doubles the cost of a token at position
// 16,384. Only the ratio between chunks matters.
float EstimateCost(const chunk::ChunkHeader& header);

// Records by key. Any thread may call. Must outlive every record.
class ChunkCatalog {
 public:
  ChunkCatalog(NamespaceTable& namespaces, const Clock& clock);

  // Returns a new record, charged to the chunk's namespace, or the living one that the key already has, with its pin
  // raised to the one in `options`. NotFound, ResourceExhausted: as Namespace and NamespaceTable. FailedPrecondition
  // names both: the key belongs to a chunk of another model or page layout.
  absl::StatusOr<std::shared_ptr<ChunkRecord>> Admit(const chunk::ChunkHeader& header,
                                                     const chunk::PutOptions& options);
  // Returns a record as it was before a restart; its quota is not enforced.
  std::shared_ptr<ChunkRecord> Restore(const IndexEntry& row);
  // Null: there is no such chunk. The record may be dead.
  std::shared_ptr<ChunkRecord> Find(const chunk::ChunkKey& key) const;
  // Returns every record for which `wanted` is true. Scans shard by shard, so that other calls wait for at most a
  // 64th of the scan.
  std::vector<std::shared_ptr<ChunkRecord>> Select(const std::function<bool(const ChunkRecord&)>& wanted) const;

  // Unix time at the start of the store, plus the time since then by the steady clock: a wall clock that jumps forward
  // while the store runs expires nothing.
  uint64_t NowMs() const;

 private:
  struct Place {
    std::weak_ptr<ChunkRecord> record;
    const ChunkRecord* address;  // distinguishes a successor under the same key from the record that ends
  };
  struct Shard {
    mutable std::mutex mutex;  // guards places; a leaf: under it nothing is locked and no record ends
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
  std::set<ModelIdentity> models_;  // a few; only grows
};

}  // namespace spl::kvstore
