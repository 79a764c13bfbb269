// Records: small named documents that are found again by name, such as the manifests of knowledge bases.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/chunk/chunk.h"

namespace spl::kvstore {

inline constexpr size_t kMaxRecordNameBytes = 512;
inline constexpr size_t kMaxRecordValueBytes = 16 << 20;
inline constexpr size_t kMaxRecordsListed = 1000;

struct Record {
  std::string name;
  uint64_t revision = 0;
  uint64_t modified_ms = 0;  // Unix time
  std::string value;         // empty in lists
  uint64_t value_bytes = 0;
};

// Storage of the table's rows. A key is the owner's 32 bytes and a name; rows are opaque. One thread writes at a time;
// others may read meanwhile.
class RecordStorage {
 public:
  virtual ~RecordStorage() = default;
  // Saves both together; they are on disk when it returns.
  virtual absl::Status SaveRecord(const std::string& key, const std::string& row, uint64_t last_revision) = 0;
  virtual absl::Status EraseRecord(const std::string& key) = 0;
  virtual absl::StatusOr<std::optional<std::string>> ReadRecord(const std::string& key) const = 0;
  // Returns the `last_revision` saved last; 0: none yet.
  virtual absl::StatusOr<uint64_t> LastRevision() const = 0;
  // Visits the rows whose keys begin with `prefix` and come after `after`, in order of their keys, until `visit`
  // returns false.
  using VisitFn = std::function<bool(std::string_view key, std::string_view row)>;
  virtual absl::Status ScanRecords(const std::string& prefix, const std::string& after, const VisitFn& visit) const = 0;
};

// For a store without a disk. ResourceExhausted: keys and rows would exceed `capacity_bytes`.
std::unique_ptr<RecordStorage> MakeMemoryRecordStorage(uint64_t capacity_bytes);

// Names are salted by their owner, and only the owner can derive the 32 bytes: records of other owners can be neither
// listed nor guessed. A change is durable when the call returns, if the storage is. Revisions grow with every put of
// the table, also across deletions and restarts, so that compare-and-swap never takes a new record for an old one. Any
// thread may call.
class RecordTable {
 public:
  // Borrows both arguments. DataLoss or Unavailable: the storage cannot be read.
  static absl::StatusOr<std::unique_ptr<RecordTable>> Open(RecordStorage& storage, bool durable, const Clock& clock);

  // NotFound: no such record. InvalidArgument: a name out of range. DataLoss: the row makes no sense.
  absl::StatusOr<Record> Get(const chunk::Digest& owner, const std::string& name) const;

  struct PutOptions {
    // Aborted unless the record has this revision (0: it must not exist); the message names the actual one.
    std::optional<uint64_t> expected_revision;
    // The record is a copy from another store: stored with that revision, without comparison, unless the one here is as
    // new.
    std::optional<uint64_t> copy_of_revision;
  };
  // Returns the revision of the record that is here now. InvalidArgument: name or value out of range.
  absl::StatusOr<uint64_t> Put(const chunk::Digest& owner, const std::string& name, const std::string& value,
                               const PutOptions& options);
  absl::Status Delete(const chunk::Digest& owner, const std::string& name, std::optional<uint64_t> expected_revision);

  struct Listed {
    std::vector<Record> records;  // without values, by name
    bool more = false;
  };
  absl::StatusOr<Listed> List(const chunk::Digest& owner, const std::string& prefix, const std::string& after,
                              size_t max_records) const;

  bool durable() const { return durable_; }

 private:
  RecordTable(RecordStorage& storage, bool durable, const Clock& clock, uint64_t last_revision)
      : storage_(storage), durable_(durable), clock_(clock), last_revision_(last_revision) {}
  absl::StatusOr<uint64_t> RevisionOf(const std::string& key) const;  // 0: none

  RecordStorage& storage_;
  const bool durable_;
  const Clock& clock_;
  std::mutex mutex_;  // guards last_revision_ and makes a comparison and its write atomic; held while the disk syncs
  uint64_t last_revision_;
};

}  // namespace spl::kvstore
