// Namespaces: how much each stores, its limits, and its time to live.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/chunk/chunk.h"

namespace spl::kvstore {

struct NamespaceSettings {
  std::string name;  // for people; need not be unique
  std::string owner;
  uint64_t quota_bytes = 0;   // limit of payload bytes; 0: none
  uint64_t quota_chunks = 0;  // 0: none
  uint64_t ttl_seconds = 0;   // time to live of a chunk since it was stored; 0: for ever
  bool is_public = false;
  chunk::Pin pin = chunk::Pin::kNone;  // pin of new chunks
};

// InvalidArgument names the field: name and owner at most 256 bytes each, ttl at most a hundred years.
absl::Status CheckSettings(const NamespaceSettings& settings);

// The index's row of a namespace that was created explicitly.
struct NamespaceRow {
  chunk::Digest id{};
  uint64_t incarnation = 0;
  uint64_t created_ms = 0;  // Unix time
  NamespaceSettings settings;
};

// One life of a namespace, shared by the records of its chunks. Deleting the namespace ends this life. The id may be
// used again, with another incarnation; chunks of the old one stay dead. Any thread may call.
class Namespace {
 public:
  explicit Namespace(const NamespaceRow& row, bool implicit);

  const chunk::Digest id;
  const uint64_t incarnation;

  // Counts one chunk. ResourceExhausted names the namespace, its use and its limit. `enforce` is false for chunks that
  // already exist, after a restart.
  absl::Status Charge(uint64_t bytes, bool enforce);
  // True: this was the last chunk of an implicit namespace (see NamespaceTable::ForgetIfUnused).
  bool Discharge(uint64_t bytes);

  bool dead() const { return dead_.load(std::memory_order_relaxed); }
  void Kill() { dead_.store(true); }
  // True if a chunk of that age is still served. Reads an atomic; takes no lock.
  bool Serves(uint64_t created_ms, uint64_t now_ms) const {
    const uint64_t ttl_ms = ttl_ms_.load(std::memory_order_relaxed);
    return !dead() && (ttl_ms == 0 || now_ms < created_ms + ttl_ms);
  }
  bool has_ttl() const { return ttl_ms_.load(std::memory_order_relaxed) != 0; }
  chunk::Pin default_pin() const;

  struct Stat {
    NamespaceRow row;
    bool implicit = false;
    uint64_t num_chunks = 0;
    uint64_t bytes = 0;
  };
  Stat stat() const;
  void Apply(const NamespaceSettings& settings, uint64_t created_ms);  // also makes it explicit

 private:
  std::string Label() const;  // for messages; call with mutex_ held

  std::atomic<bool> dead_{false};
  std::atomic<uint64_t> ttl_ms_{0};
  mutable std::mutex mutex_;  // guards all below
  NamespaceSettings settings_;
  uint64_t created_ms_ = 0;
  bool implicit_ = true;
  uint64_t num_chunks_ = 0;
  uint64_t bytes_ = 0;
};

// Storage of the table's rows. Both calls return when the change is on disk.
class NamespaceStorage {
 public:
  virtual ~NamespaceStorage() = default;
  virtual absl::Status SaveNamespace(const NamespaceRow& row) = 0;
  // Removes the row and records that chunks of this and earlier incarnations are dead.
  virtual absl::Status BuryNamespace(const chunk::Digest& id, uint64_t incarnation) = 0;
};

// All known namespaces: those that were created (at most 1,000 per owner), and implicit ones, which came into being
// when chunks were put into them (no quota, no TTL) and exist as long as they have chunks. The default namespace always
// exists; it cannot be created or deleted, but its settings can be changed.
class NamespaceTable {
 public:
  explicit NamespaceTable(const Clock& clock);

  // Takes over a row of the index. Call before anything else.
  void Restore(const NamespaceRow& row);
  // Makes later creations, changes and deletions persistent. Borrows.
  void SaveTo(NamespaceStorage* storage) { storage_ = storage; }
  // Returns the life to which a chunk found on disk belongs; creates it implicitly if it is unknown.
  std::shared_ptr<Namespace> Adopt(const chunk::Digest& id, uint64_t incarnation);

  // Returns the living namespace. Unknown: NotFound if `required`, otherwise creates an implicit one.
  absl::StatusOr<std::shared_ptr<Namespace>> Use(const chunk::Digest& id, bool required);

  // ResourceExhausted: the owner has too many. An empty owner (the store's own operator) has no limit.
  absl::StatusOr<Namespace::Stat> Create(const chunk::Digest& id, const NamespaceSettings& settings);
  absl::StatusOr<Namespace::Stat> Set(const chunk::Digest& id, const NamespaceSettings& settings);
  absl::StatusOr<Namespace::Stat> Stat(const chunk::Digest& id) const;
  std::vector<Namespace::Stat> List(const std::string& owner) const;  // by id; empty owner: all
  // Ends the namespace and returns the dead life, whose chunks the caller then removes. Its chunks are misses from now
  // on, even after a crash.
  absl::StatusOr<std::shared_ptr<Namespace>> Delete(const chunk::Digest& id);
  // Removes an implicit namespace that has no chunks and to which only the caller still refers.
  void ForgetIfUnused(std::shared_ptr<Namespace> last);
  size_t size() const;  // living namespaces
  // True if a sweep may find something: a namespace with a TTL exists, or a dead one that still has chunks.
  bool NeedsSweep() const;

 private:
  std::shared_ptr<Namespace> MakeLocked(const chunk::Digest& id);
  uint64_t NextIncarnationLocked();

  NamespaceStorage* storage_ = nullptr;  // set before other threads call
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below; taken before a Namespace's own, held during storage calls
  std::map<chunk::Digest, std::shared_ptr<Namespace>> living_;
  std::vector<std::weak_ptr<Namespace>> buried_;  // dead lives that still have chunks
  uint64_t last_incarnation_ = 0;
};

}  // namespace spl::kvstore
