// How much a prefill engine has to compute, and how fast it does: what placement and the store are told.
#pragma once

#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/model/prefill_cost.h"

namespace spl::engine {

struct PrefillLoad {
  size_t queued_requests = 0;
  int64_t queued_tokens = 0;  // still to compute, running ones included
  double tokens_per_s = 0;    // smoothed; the warm-up gives the first value
};

// Any thread.
class PrefillMeter {
 public:
  explicit PrefillMeter(const ModelConfig& config) : cost_(config) {}

  // Runs a short prompt twice: the first pass builds kernels and touches memory, the second gives a first speed.
  // InvalidArgument: the pool is too small for it.
  absl::Status WarmUp(ParallelExecutor& executor, PagePool& pool);

  // A prompt has `tokens` to compute from now on; `share` is what it counted as before, 0 at first.
  void SetQueued(int64_t& share, int64_t tokens);
  // A pass took so long; `tokens` are rows times the share of the layers, `cost` is PrefillCost's.
  void Add(double tokens, double cost, double seconds);

  const PrefillCost& cost() const { return cost_; }
  // Positions [first, first + count) of a prompt, at the measured speed.
  double RecomputeSeconds(int64_t first, int32_t count) const;
  PrefillLoad load(size_t queued_requests) const;

 private:
  const PrefillCost cost_;
  mutable std::mutex mutex_;  // guards all below
  int64_t queued_tokens_ = 0;
  double tokens_per_s_ = 0;
  double cost_per_s_ = 0;
};

}  // namespace spl::engine
