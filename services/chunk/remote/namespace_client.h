// Namespaces on all chunk stores at once; see proto/spl/v1/kvstore_admin.proto.
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

struct NamespaceSettings {
  std::string name;
  std::string owner;
  uint64_t quota_bytes = 0;   // limit of payload bytes, on each store; 0: none
  uint64_t quota_chunks = 0;  // limit of chunks, on each store; 0: none
  uint64_t ttl_seconds = 0;   // 0: for ever
  bool is_public = false;
};

struct NamespaceInfo {
  Digest id{};
  NamespaceSettings settings;
  bool implicit = false;
  uint64_t created_ms = 0;  // Unix time
  uint64_t chunks = 0;      // sum over all stores
  uint64_t bytes = 0;
};

// A chunk may live on any member, so a namespace is created, set and deleted on all of them. Every call needs all
// members. Unavailable and DeadlineExceeded name the member that does not answer; repeat the call when it is back, all
// calls are idempotent. Blocking; any thread may call.
class NamespaceClient {
 public:
  // Arguments as RecordClient takes them.
  static absl::StatusOr<std::unique_ptr<NamespaceClient>> Connect(const std::string& addresses,
                                                                  const PeerTls* tls = nullptr);
  virtual ~NamespaceClient() = default;

  using Deadline = std::chrono::steady_clock::time_point;
  // AlreadyExists: it exists on all members. If it exists on some, their settings are replaced.
  virtual absl::StatusOr<NamespaceInfo> Create(const Digest& id, const NamespaceSettings& settings,
                                               Deadline deadline) = 0;
  // NotFound: it exists on no member.
  virtual absl::StatusOr<NamespaceInfo> Stat(const Digest& id, Deadline deadline) = 0;
  // NotFound: it was created on no member. A member that joined later gets it.
  virtual absl::StatusOr<NamespaceInfo> Set(const Digest& id, const NamespaceSettings& settings, Deadline deadline) = 0;
  struct Deleted {
    uint64_t chunks = 0;
    uint64_t bytes = 0;
  };
  // NotFound: it exists on no member.
  virtual absl::StatusOr<Deleted> Delete(const Digest& id, Deadline deadline) = 0;
  // Returns the namespaces with this owner in their settings, by id.
  virtual absl::StatusOr<std::vector<NamespaceInfo>> List(const std::string& owner, Deadline deadline) = 0;
};

}  // namespace spl::chunk
