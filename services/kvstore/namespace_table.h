// Namespaces: who stores how much, how much they may, and for how long.
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
  uint64_t quota_bytes = 0;   // of payloads; 0: none
  uint64_t quota_chunks = 0;  // 0: none
  uint64_t ttl_seconds = 0;   // of a chunk since it was stored; 0: for ever
  bool is_public = false;
  chunk::Pin pin = chunk::Pin::kNone;  // of chunks to come
};

// InvalidArgument naming the field: name and owner at most 256 bytes each, ttl at most a hundred years.
absl::Status CheckSettings(const NamespaceSettings& settings);

// What a row of the index holds of a namespace that was created.
struct NamespaceRow {
  chunk::Digest id{};
  uint64_t incarnation = 0;
  uint64_t created_ms = 0;  // Unix time
  NamespaceSettings settings;
};

// One life of a namespace, shared by the records of its chunks. Deleting it ends this life; the id may live again, with
// another incarnation, and chunks of the old one stay dead. Any thread may call.
class Namespace {
 public:
  explicit Namespace(const NamespaceRow& row, bool implicit);

  const chunk::Digest id;
  const uint64_t incarnation;

  // Counts one chunk. ResourceExhausted naming the namespace, its use and its limit. `enforce` is false for chunks that
  // are there already, after a restart.
  absl::Status Charge(uint64_t bytes, bool enforce);
  // True: that was the last chunk of an implicit namespace (NamespaceTable::ForgetIfUnused).
  bool Discharge(uint64_t bytes);

  bool dead() const { return dead_.load(std::memory_order_relaxed); }
  void Kill() { dead_.store(true); }
  // A chunk of that age is still served. Reads an atomic; no lock.
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
  std::string Label() const;  // for messages; mutex_ held

  std::atomic<bool> dead_{false};
  std::atomic<uint64_t> ttl_ms_{0};
  mutable std::mutex mutex_;  // guards all below
  NamespaceSettings settings_;
  uint64_t created_ms_ = 0;
  bool implicit_ = true;
  uint64_t num_chunks_ = 0;
  uint64_t bytes_ = 0;
};

// Where the table keeps its rows. Both are on disk when they return.
class NamespaceStorage {
 public:
  virtual ~NamespaceStorage() = default;
  virtual absl::Status SaveNamespace(const NamespaceRow& row) = 0;
  // Removes the row and notes that chunks of this and earlier incarnations are dead.
  virtual absl::Status BuryNamespace(const chunk::Digest& id, uint64_t incarnation) = 0;
};

// All namespaces that are known: created ones, at most 1,000 of one owner, and those that chunks were put into without
// (implicit: no quota, no TTL), as long as they have chunks. The default namespace is always there and cannot be
// created or deleted, but can be set.
class NamespaceTable {
 public:
  explicit NamespaceTable(const Clock& clock);

  // From the index, before anything else.
  void Restore(const NamespaceRow& row);
  // What is created, set and deleted from here on outlives the process. Borrows.
  void SaveTo(NamespaceStorage* storage) { storage_ = storage; }
  // The life that a chunk found on disk belongs to, made implicitly when it is not known.
  std::shared_ptr<Namespace> Adopt(const chunk::Digest& id, uint64_t incarnation);

  // The living namespace. Unknown: NotFound when `required`, else an implicit one.
  absl::StatusOr<std::shared_ptr<Namespace>> Use(const chunk::Digest& id, bool required);

  // ResourceExhausted: the owner has too many. An empty owner, the store's own operator, may have any number.
  absl::StatusOr<Namespace::Stat> Create(const chunk::Digest& id, const NamespaceSettings& settings);
  absl::StatusOr<Namespace::Stat> Set(const chunk::Digest& id, const NamespaceSettings& settings);
  absl::StatusOr<Namespace::Stat> Stat(const chunk::Digest& id) const;
  std::vector<Namespace::Stat> List(const std::string& owner) const;  // by id; empty owner: all
  // The dead life, whose chunks the caller now removes. Its chunks are misses from here on, also after a crash.
  absl::StatusOr<std::shared_ptr<Namespace>> Delete(const chunk::Digest& id);
  // Takes an implicit namespace out that has no chunks and that only the caller still holds.
  void ForgetIfUnused(std::shared_ptr<Namespace> last);
  size_t size() const;  // of the living
  // A namespace with a TTL, or a dead one that still has chunks, exists: a sweep may find something.
  bool NeedsSweep() const;

 private:
  std::shared_ptr<Namespace> MakeLocked(const chunk::Digest& id);
  uint64_t NextIncarnationLocked();

  NamespaceStorage* storage_ = nullptr;  // set before other threads call
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below; taken before a Namespace's own, held during storage calls
  std::map<chunk::Digest, std::shared_ptr<Namespace>> living_;
  std::vector<std::weak_ptr<Namespace>> buried_;  // those whose chunks are not all gone yet
  uint64_t last_incarnation_ = 0;
};

}  // namespace spl::kvstore
