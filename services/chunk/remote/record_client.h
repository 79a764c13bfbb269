// Records of the chunk stores: small named documents, see proto/spl/v1/kvstore_records.proto.
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
// second. The first one decides (compare-and-swap happens there): while it does not answer, nothing can be changed, and
// reads come from the copy, which may lack what was put while its own store was away. A deletion needs both, so that
// what was deleted does not come back with the copy. A record that is only on the second, because a member was added,
// is brought to the first by the next read.
//
// Blocking; any thread may call. Unavailable and DeadlineExceeded name the store; a change that ends so may have
// happened.
class RecordClient {
 public:
  // `addresses`: "HOST:PORT" or "HOST:PORT,HOST:PORT,…". Does not wait for connections. InvalidArgument: malformed,
  // none, or one twice. `tls` as MakePeerChannel takes it.
  static absl::StatusOr<std::unique_ptr<RecordClient>> Connect(const std::string& addresses,
                                                               const PeerTls* tls = nullptr);
  virtual ~RecordClient() = default;

  using Deadline = std::chrono::steady_clock::time_point;
  // NotFound.
  virtual absl::StatusOr<StoredRecord> Get(const Digest& owner, const std::string& name, Deadline deadline) = 0;
  struct PutOptions {
    // Aborted unless the record has this revision; 0: does not exist.
    std::optional<uint64_t> expected_revision;
    bool durable = true;  // FailedPrecondition from a store without a disk
  };
  // The new revision. InvalidArgument: more than 16 MiB.
  virtual absl::StatusOr<uint64_t> Put(const Digest& owner, const std::string& name, const std::string& value,
                                       const PutOptions& options, Deadline deadline) = 0;
  // NotFound; Aborted as for Put.
  virtual absl::Status Delete(const Digest& owner, const std::string& name, std::optional<uint64_t> expected_revision,
                              Deadline deadline) = 0;
  // All whose names begin with `prefix`, by name, without values.
  virtual absl::StatusOr<std::vector<StoredRecord>> List(const Digest& owner, const std::string& prefix,
                                                         Deadline deadline) = 0;
};

}  // namespace spl::chunk
