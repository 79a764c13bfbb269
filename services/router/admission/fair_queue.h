// The order of requests that wait: tenants share by deficit round robin over tokens, a tenant's own requests go by
// priority and age.
//
// Deficit round robin after Shreedhar and Varghese (SIGCOMM 1995): tenants stand in a ring; the one in front may send
// what its deficit covers, and gets weight × quantum more each time its turn comes. Over time every tenant that always
// has something waiting gets its weight's share of tokens, whatever the sizes of its requests.
//
// Priority p (lower goes first, as in vLLM) is worth p × ageing seconds of waiting: requests of a tenant are ordered by
// arrival + p × ageing. The order of two requests never changes, and none waits for ever: those that come more than the
// difference of priorities × ageing later stand behind it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"

namespace spl::router {

struct FairQueueOptions {
  double quantum_tokens = 8192;
  std::chrono::milliseconds ageing{10'000};  // of waiting that one step of priority is worth
};

struct QueuedRequest {
  uint64_t id = 0;
  std::string tenant;
  double weight = 1;     // of the tenant; above 0
  int32_t priority = 0;  // lower goes first
  uint32_t tokens = 1;   // what the turn costs
  std::function<void()> start;
  std::function<void(absl::Status)> refuse;  // it had to leave the queue for another tenant's request; may be empty
};

// Not thread-safe. Cost of a call: O(log n), and of Pop the tenants between two that can go.
class FairQueue {
 public:
  using Clock = std::chrono::steady_clock;

  explicit FairQueue(const FairQueueOptions& options) : options_(options) {}

  void Push(QueuedRequest request, Clock::time_point now);
  // In front of all: it has had its turn and found no room. Costs its tenant nothing again.
  void PushFront(QueuedRequest request);
  std::optional<QueuedRequest> Pop();
  bool Remove(uint64_t id);
  // Takes out the last request of the tenant that has the most waiting, if `tenant` would still have fewer with one
  // more: room for a newcomer.
  std::optional<QueuedRequest> Displace(const std::string& tenant);

  size_t size() const { return front_.size() + where_.size(); }
  bool empty() const { return size() == 0; }

 private:
  struct Place {
    Clock::time_point order;  // arrival, moved by priority
    uint64_t sequence = 0;    // of equals the first
    auto operator<=>(const Place&) const = default;
  };
  struct Tenant {
    std::string name;
    double weight = 1;
    double deficit = 0;
    std::map<Place, QueuedRequest> waiting;
  };
  using Ring = std::list<Tenant>;

  std::optional<QueuedRequest> Take(Ring::iterator tenant, std::map<Place, QueuedRequest>::iterator place);

  const FairQueueOptions options_;
  std::list<QueuedRequest> front_;
  Ring ring_;  // tenants with something waiting; the one whose turn it is first
  std::map<std::string, Ring::iterator> tenants_;
  std::map<uint64_t, std::pair<Ring::iterator, Place>> where_;  // of what is in the ring
  uint64_t next_sequence_ = 0;
};

}  // namespace spl::router
