// Membership in etcd, by the gRPC services KV, Lease and Watch of its version 3 API. Members are the keys
//   PREFIX/members/ROLE/WORKER_ID → member_json.h
// under leases of a few seconds.
//
// Reading. One list, then a watch from the revision behind it. A watch that breaks is resumed at another address from
// the last revision seen; when that revision is compacted, or the store is not the one that it was (another cluster id,
// or a revision that went back), the list is read anew. Members that such a new list has no more are kept for
// `absent_grace`: an etcd that has lost its data must not cost the routers their workers, who register again within a
// lease. Writing. A worker that cannot reach etcd goes on trying at every address in turn; when its lease is gone it
// makes another.
//
// A user's token that etcd knows no more is replaced by another one, and the call made again.
//
// Every call has a deadline; a watch is cut by HTTP/2 pings or by etcd itself when it has no leader.
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
  std::chrono::seconds lease_ttl{5};           // renewed three times in it; etcd grants 2 s at least
  std::chrono::milliseconds absent_grace{10'000};
};

std::unique_ptr<Discovery> MakeEtcdDiscovery(EtcdOptions options);
// `member` has a worker_id.
std::unique_ptr<Registration> MakeEtcdRegistration(EtcdOptions options, Member member);

}  // namespace spl::membership
