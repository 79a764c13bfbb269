// Which chunk stands in which slot, in RocksDB.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"

namespace spl::kvstore {

struct SlotRef {
  uint64_t slot_bytes = 0;  // names the slab file
  uint64_t slot = 0;
  bool operator==(const SlotRef&) const = default;
};

struct IndexEntry {
  chunk::ChunkKey key;
  SlotRef slot;
  uint64_t sequence = 0;  // of insertion: the eviction order after a restart
};

// Thread-safe. Errors are Unavailable with RocksDB's words.
class DiskIndex {
 public:
  // FailedPrecondition: the directory belongs to another program version or is in use. DataLoss: RocksDB cannot read
  // it.
  static absl::StatusOr<std::unique_ptr<DiskIndex>> Open(const std::string& dir);
  virtual ~DiskIndex() = default;

  // All or nothing, on disk when it returns.
  virtual absl::Status Add(std::span<const IndexEntry> entries) = 0;
  // All or nothing; survives the death of the process at once and that of the machine a little later.
  virtual absl::Status Remove(std::span<const chunk::ChunkKey> keys) = 0;
  // Every readable entry; returns how many unreadable ones it removed.
  virtual absl::StatusOr<uint64_t> Load(const std::function<void(const IndexEntry&)>& sink) = 0;
};

}  // namespace spl::kvstore
