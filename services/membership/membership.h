// The members of the cluster: its workers and their addresses. There are three back ends behind one interface
// (static_list, etcd, kubernetes); the flag --discovery chooses one.
//
// Membership says where workers are, not whether they are well. The router polls every member by itself, and stops
// using one that hangs long before its lease has ended. A back end that cannot be reached therefore changes nothing:
// the last list stays in force.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::membership {

enum class Role { kPrefill, kDecode };
const char* RoleName(Role role);  // "prefill", "decode"

// One worker as its back end knows it. Only role and address are always set (a list of addresses knows no more). The
// worker's own answer to GetInfo is decisive.
struct Member {
  Role role = Role::kPrefill;
  std::string address;      // HOST:PORT of its gRPC server
  std::string worker_id;    // empty: unknown
  uint64_t epoch = 0;       // this life of the process; 0: unknown
  std::string fingerprint;  // model fingerprint, lower-case hex; empty: unknown
  std::string head_map;     // digest of the map of head classes, lower-case hex; empty: none or unknown
  uint64_t capacity = 0;    // KV pages; 0: unknown
  uint32_t wire_min = 0;    // range of versions of the protocol between programs that it speaks; 0: unknown
  uint32_t wire_max = 0;

  bool operator==(const Member&) const = default;
};

// All members at one moment, ascending by role and address, without duplicate addresses.
using Members = std::vector<Member>;
void Normalize(Members& members);

// A source of members. Thread-safe; Stop before destruction.
class Discovery {
 public:
  // Called with the whole list when it has changed, one call at a time, on a thread of the back end. Must not block.
  using OnChange = std::function<void(const Members&)>;

  virtual ~Discovery() = default;
  // Call once. The first list may come during the call (static), or as late as the back end answers.
  virtual void Start(OnChange on_change) = 0;
  // Returns when no call of on_change is running or will come. Idempotent.
  virtual void Stop() = 0;
  // For logs, for example "etcd 10.0.0.1:2379 /splice".
  virtual std::string description() const = 0;
};

// A worker's entry in the list. A thread of its own keeps the lease, so the entry goes when the process ends or hangs.
// Stop removes it at once; the routers then send nothing new.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void Stop() = 0;  // idempotent; takes a few seconds at most
};

// The value of --discovery:
//   static                                    lists on the command line (--prefill, --decode)
//   etcd://HOST:PORT[,HOST:PORT…][/PREFIX]    members below PREFIX (default /splice) of etcd's version 3 API
//   kubernetes://NAMESPACE/SERVICE            the slices of the services SERVICE-prefill and SERVICE-decode
struct Spec {
  enum class Kind { kStatic, kEtcd, kKubernetes };
  Kind kind = Kind::kStatic;
  std::vector<std::string> endpoints;  // etcd
  std::string prefix;                  // etcd: prefix of keys, with a leading and without a trailing slash
  std::string name_space;              // Kubernetes
  std::string service;                 // Kubernetes
};
// InvalidArgument says what is wrong with the text.
absl::StatusOr<Spec> ParseSpec(const std::string& text);

}  // namespace spl::membership
