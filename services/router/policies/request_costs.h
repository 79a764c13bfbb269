// Actual costs of requests, learned from the receipts of served ones: the inputs of the placement cost that no worker
// reports.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "services/router/request/request.h"

namespace spl::router {

struct RequestCost {
  double wire_share = 1;         // share of the prompt's dense KV that goes from prefill to decode
  double aligned_cost = 0.25;    // cost of an aligned token, in fully computed tokens (docs/segments.md: ℓ*/L and k)
  double fetch_bytes_per_s = 0;  // from the chunk store; 0: no fetch was seen yet
};

// The method of a request whose policy is resolved.
struct AskedMethod {
  const v1::ReuseOptions& reuse;
  bool chooses = false;  // GenerationRequest::choose_method
};

// Smoothed (a receipt counts one eighth), per reuse policy; the store's rate is shared by all. Thread-safe.
//
// Where the prefill worker chooses the method, or holds it to a contract, costs are those of what it chose, which
// depends on the length of the prompt: they are learned apart, for prompts of each power of two, and say nothing of the
// method by its name. A prompt whose copies were left unused shows that they save nothing.
class RequestCosts {
 public:
  static constexpr size_t kMaxPolicies = 256;

  RequestCost Of(const AskedMethod& asked, uint64_t prompt_tokens) const;

  struct Worker {
    double tokens_per_s = 0;          // speed of the prefill worker that served it; 0: unknown
    uint64_t kv_bytes_per_token = 0;  // 0: unknown
  };
  void Observe(const AskedMethod& asked, const v1::Receipt& receipt, const Worker& worker);

 private:
  mutable std::mutex mutex_;  // guards the two below
  std::map<std::string, RequestCost> by_policy_;
  double fetch_bytes_per_s_ = 0;
};

}  // namespace spl::router
