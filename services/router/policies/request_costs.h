// What requests really cost, learned from the receipts of those that were served: the numbers of the placement cost
// that no worker reports.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "services/router/request/request.h"

namespace spl::router {

struct RequestCost {
  double wire_share = 1;  // of the prompt's dense KV that goes from prefill to decode
  double aligned_cost =
      0.25;  // of an aligned token, in tokens that are computed in full (docs/segments.md: ℓ*/L and k)
  double fetch_bytes_per_s = 0;  // from the chunk store; 0: no fetch was seen yet
};

// Smoothed (a receipt counts one eighth), per reuse policy; the store's rate is one for all. Thread-safe.
class RequestCosts {
 public:
  static constexpr size_t kMaxPolicies = 64;

  RequestCost Of(const v1::ReuseOptions& reuse) const;

  struct Worker {
    double tokens_per_s = 0;          // of the prefill worker that served it; 0: not known
    uint64_t kv_bytes_per_token = 0;  // 0: not known
  };
  void Observe(const v1::ReuseOptions& reuse, const RequestReceipt& receipt, const Worker& worker);

 private:
  mutable std::mutex mutex_;  // guards the two below
  std::map<std::string, RequestCost> by_policy_;
  double fetch_bytes_per_s_ = 0;
};

}  // namespace spl::router
