// Records of the chunk stores: small named documents; see proto/spl/v1/kvstore_records.proto.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/tls.h"
#include "services/chunk/chunk.h"

namespace spl::chunk {

struct StoredRecord {
  std::string name;
  uint64_t revision = 0;
  uint64_t modified_ms = 0;  // Unix time
  std::string value;         // empty in lists
  uint64_t value_bytes = 0;
};

// The records of one owner live on the member that rendezvous hashing ranks first for the owner, with a copy on the
// second.
//
// The first member decides (compare-and-swap happens there). While it does not answer, nothing can be changed, and
// reads come from the copy, which may lack records put while its own store was away. A deletion needs both members, so
// that a deleted record does not come back with the copy. A record that exists only on the second, because a member was
// added, is copied to the first by the next read.
//
// Blocking; any thread may call. Unavailable and DeadlineExceeded name the store; the change may have happened then.
class RecordClient {
 public:
  // `addresses`: "HOST:PORT" or "HOST:PORT,HOST:PORT,…". Does not wait for connections. InvalidArgument: malformed,
  // empty, or an address twice. `tls` as for MakePeerChannel.
  static absl::StatusOr<std::unique_ptr<RecordClient>> Connect(const std::string& addresses,
                                                               const PeerTls* tls = nullptr);
  virtual ~RecordClient() = default;

  using Deadline = std::chrono::steady_clock::time_point;
  // NotFound: no such record.
  virtual absl::StatusOr<StoredRecord> Get(const Digest& owner, const std::string& name, Deadline deadline) = 0;
  struct PutOptions {
    // Aborted unless the record has this revision. 0: the record must not exist.
    std::optional<uint64_t> expected_revision;
    bool durable = true;  // FailedPrecondition from a store without a disk
  };
  // Returns the new revision. InvalidArgument: more than 16 MiB.
  virtual absl::StatusOr<uint64_t> Put(const Digest& owner, const std::string& name, const std::string& value,
                                       const PutOptions& options, Deadline deadline) = 0;
  // NotFound: no such record. Aborted as for Put.
  virtual absl::Status Delete(const Digest& owner, const std::string& name, std::optional<uint64_t> expected_revision,
                              Deadline deadline) = 0;
  // Returns all records whose names begin with `prefix`, by name, without values.
  virtual absl::StatusOr<std::vector<StoredRecord>> List(const Digest& owner, const std::string& prefix,
                                                         Deadline deadline) = 0;
};

}  // namespace spl::chunk
