// The persistent data beside the payloads, in RocksDB: the slot of each chunk, the namespaces, and the records (in a
// column family of their own).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/kvstore/namespace_table.h"
#include "services/kvstore/record_table.h"

namespace spl::kvstore {

struct SlotRef {
  uint64_t slot_bytes = 0;  // names the slab file
  uint64_t slot = 0;
  bool operator==(const SlotRef&) const = default;
};

struct IndexEntry {
  chunk::ChunkKey key;
  SlotRef slot;
  uint64_t sequence = 0;  // order of insertion
  chunk::Digest namespace_id = chunk::kDefaultNamespace;
  uint64_t incarnation = 0;  // the namespace's incarnation
  uint64_t created_ms = 0;
  uint64_t payload_bytes = 0;
  chunk::Pin pin = chunk::Pin::kNone;
  uint32_t uses = 0;
  float cost_seconds = 0;
  double priority = 0;  // its place in the order of eviction
  // Copied from the chunk's header; all zero in rows of the first version of the store.
  chunk::Digest model_fingerprint{};
  chunk::Digest layout_digest{};
};

// Thread-safe. Errors are Unavailable, with RocksDB's message.
class DiskIndex : public NamespaceStorage, public RecordStorage {
 public:
  // FailedPrecondition: the directory belongs to another program version, or is in use. DataLoss: RocksDB cannot read
  // it.
  static absl::StatusOr<std::unique_ptr<DiskIndex>> Open(const std::string& dir);
  ~DiskIndex() override = default;

  // Adds all entries or none; they are on disk when it returns.
  virtual absl::Status Add(std::span<const IndexEntry> entries) = 0;
  // Overwrites entries that exist, with another pin, count of uses, or priority: all or none. Survives the death of the
  // process at once, and that of the machine a little later.
  virtual absl::Status Update(std::span<const IndexEntry> entries) = 0;
  // As durable as Update.
  virtual absl::Status Remove(std::span<const chunk::ChunkKey> keys) = 0;
  struct Loaded {
    std::vector<NamespaceRow> namespaces;
    std::vector<IndexEntry> entries;  // chunks of buried namespaces are left out and removed
    uint64_t num_unreadable = 0;      // nonsensical rows, which were removed
  };
  virtual absl::StatusOr<Loaded> Load() = 0;
};

}  // namespace spl::kvstore
