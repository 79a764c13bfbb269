// Membership in etcd, through the gRPC services KV, Lease and Watch of its version 3 API. Members are the keys
//   PREFIX/members/ROLE/WORKER_ID → member_json.h
// under leases of a few seconds.
//
// Reading: one list, then a watch from the next revision. A broken watch resumes at another address from the last
// revision seen. If that revision is compacted, or the store is not the same (another cluster id, or a revision that
// went back), the list is read again. Members missing from such a new list are kept for `absent_grace`: an etcd that
// has lost its data must not cost the routers their workers, which register again within a lease.
//
// Writing: a worker that cannot reach etcd keeps trying every address in turn. When its lease is gone, it makes
// another.
//
// If etcd no longer knows a user's token, the client gets another one and repeats the call.
//
// Every call has a deadline. A watch ends by HTTP/2 pings, or by etcd itself when it has no leader.
#pragma once

#include "services/membership/etcd_access.h"
#include "services/membership/membership.h"

namespace spl::membership {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // HOST:PORT, tried in turn
  std::string prefix = "/splice";
  EtcdAccessOptions access;
  std::chrono::milliseconds call_timeout{2'000};
  std::chrono::milliseconds retry_pause{250};  // before the next address is tried
  std::chrono::seconds lease_ttl{5};           // renewed three times within it; etcd grants at least 2 s
  std::chrono::milliseconds absent_grace{10'000};
};

std::unique_ptr<Discovery> MakeEtcdDiscovery(EtcdOptions options);
// `member` must have a worker_id.
std::unique_ptr<Registration> MakeEtcdRegistration(EtcdOptions options, Member member);

}  // namespace spl::membership
