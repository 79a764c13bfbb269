// Several chunk stores as one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/metrics.h"
#include "services/chunk/chunk.h"
#include "services/chunk/remote/circuit_breaker.h"
#include "services/chunk/remote/remote_chunk_store.h"

namespace spl::chunk {

struct ClusterStoreOptions {
  CircuitBreakerOptions breaker;
  std::chrono::milliseconds probe_timeout{1000};
  Metrics* metrics = nullptr;  // splice_store_node_up and splice_store_node_failures_total by node; borrowed
  const Clock* clock = &Clock::Real();
};

// Every chunk lives on the member that rendezvous hashing ranks first; a pinned chunk also on the second.
//
// A member that does not answer is left out: its circuit breaker opens, one line is logged, and a background thread
// tries it again. Its keys go to their next choice, where pinned chunks are found and others are misses. A lost member
// therefore costs hits, never a request. With all members lost, every call is a miss and only Put returns Unavailable.
// Other failures are those of the members; DataLoss from one counts as a miss. Members are asked in parallel. Any
// thread may call.
class ClusterChunkStore : public ChunkStore {
 public:
  struct Member {
    std::string name;  // the name that is hashed: the same in every client
    std::unique_ptr<ChunkStore> store;
  };
  static std::unique_ptr<ClusterChunkStore> Create(std::vector<Member> members, const ClusterStoreOptions& options);
  // `addresses`: "HOST:PORT" or "HOST:PORT,HOST:PORT,…". InvalidArgument: malformed, empty, or an address twice.
  static absl::StatusOr<std::unique_ptr<ClusterChunkStore>> Connect(const std::string& addresses,
                                                                    const RemoteStoreOptions& remote,
                                                                    const ClusterStoreOptions& options);

  virtual size_t num_members_up() const = 0;
};

// Member addresses as Connect takes them.
absl::StatusOr<std::vector<std::string>> ParseMemberList(const std::string& addresses);

}  // namespace spl::chunk
