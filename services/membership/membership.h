// Who belongs to the cluster: which workers there are and where. Three back ends behind one interface (static_list,
// etcd, kubernetes); which one a program uses is what its flag --discovery says.
//
// Membership says where to look, not who is well: the router polls every member by itself, and one that hangs is out of
// use long before its lease has ended. So a back end that cannot be reached changes nothing: the last list stays in
// force.
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

// One worker as its back end knows it. Only role and address are always there: a list of addresses knows no more, and
// what a worker says of itself when it is asked (GetInfo) counts.
struct Member {
  Role role = Role::kPrefill;
  std::string address;      // HOST:PORT of its gRPC server
  std::string worker_id;    // empty: not known
  uint64_t epoch = 0;       // of this life of the process; 0: not known
  std::string fingerprint;  // of the model, lower-case hex; empty: not known
  std::string head_map;     // digest of the map of head classes, lower-case hex; empty: none, or not known
  uint64_t capacity = 0;    // KV pages; 0: not known
  uint32_t wire_min = 0;    // versions of the protocol between programs that it speaks; 0: not known
  uint32_t wire_max = 0;

  bool operator==(const Member&) const = default;
};

// All members at one moment, ascending by role and address, no address twice.
using Members = std::vector<Member>;
void Normalize(Members& members);

// A source of members. Thread-safe; Stop before destruction.
class Discovery {
 public:
  // The whole list, whenever it is not what it was; one call at a time, on a thread of the back end. Must not block.
  using OnChange = std::function<void(const Members&)>;

  virtual ~Discovery() = default;
  // Once. The first list may come during the call (static) or as late as the back end answers.
  virtual void Start(OnChange on_change) = 0;
  // Returns when no call of on_change is running or to come. Idempotent.
  virtual void Stop() = 0;
  // For logs: "etcd 10.0.0.1:2379 /splice".
  virtual std::string description() const = 0;
};

// A worker's place in the list, held under a lease by a thread of its own: it goes when the process ends or hangs.
// Stop gives it up at once; the routers then send nothing new.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void Stop() = 0;  // idempotent; a few seconds at most
};

// What --discovery says.
//   static                                    lists on the command line (--prefill, --decode)
//   etcd://HOST:PORT[,HOST:PORT…][/PREFIX]    members below PREFIX (default /splice) of etcd's version 3 API
//   kubernetes://NAMESPACE/SERVICE            the slices of the services SERVICE-prefill and SERVICE-decode
struct Spec {
  enum class Kind { kStatic, kEtcd, kKubernetes };
  Kind kind = Kind::kStatic;
  std::vector<std::string> endpoints;  // of etcd
  std::string prefix;                  // of etcd's keys, with a leading and without a closing slash
  std::string name_space;              // of Kubernetes
  std::string service;                 // likewise
};
// InvalidArgument says what is wrong with the text.
absl::StatusOr<Spec> ParseSpec(const std::string& text);

}  // namespace spl::membership
