// Order of waiting requests: tenants share by deficit round robin over tokens; the requests of one tenant go by
// priority and age.
//
// Deficit round robin after Shreedhar and Varghese (SIGCOMM 1995): tenants stand in a ring. The first one may send
// requests up to its deficit, which grows by weight × quantum at each of its turns. Over time every tenant that always
// has waiting requests gets tokens in proportion to its weight, whatever the sizes of its requests.
//
// Priority p (lower goes first, as in vLLM) is worth p × ageing seconds of waiting: a tenant's requests are ordered by
// arrival + p × ageing. The order of two requests never changes, and no request waits for ever: those that arrive later
// by more than the difference of priorities × ageing stand behind it.
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
  std::chrono::milliseconds ageing{10'000};  // waiting time that one step of priority is worth
};

struct QueuedRequest {
  uint64_t id = 0;
  std::string tenant;
  double weight = 1;     // the tenant's weight; above 0
  int32_t priority = 0;  // lower goes first
  uint32_t tokens = 1;   // cost of the turn
  std::function<void()> start;
  // called if the request must leave the queue for another tenant's; may be empty
  std::function<void(absl::Status)> refuse;
};

// Not thread-safe. Cost: O(log n) per call; Pop also visits the tenants between two that can go.
class FairQueue {
 public:
  using Clock = std::chrono::steady_clock;

  explicit FairQueue(const FairQueueOptions& options) : options_(options) {}

  void Push(QueuedRequest request, Clock::time_point now);
  // Puts a request first: it has had its turn and found no room. Its tenant pays only once.
  void PushFront(QueuedRequest request);
  std::optional<QueuedRequest> Pop();
  bool Remove(uint64_t id);
  // Makes room for a newcomer of `tenant`: removes the last request of the tenant with the most waiting, if `tenant`
  // would still have fewer with one more.
  std::optional<QueuedRequest> Displace(const std::string& tenant);

  size_t size() const { return front_.size() + where_.size(); }
  bool empty() const { return size() == 0; }

 private:
  struct Place {
    Clock::time_point order;  // arrival, moved by priority
    uint64_t sequence = 0;    // ties: the lower goes first
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
  Ring ring_;  // tenants with waiting requests; next turn first
  std::map<std::string, Ring::iterator> tenants_;
  std::map<uint64_t, std::pair<Ring::iterator, Place>> where_;  // positions of the waiting requests
  uint64_t next_sequence_ = 0;
};

}  // namespace spl::router
