// Measures the work and the speed of a prefill engine, for placement and the store.
#pragma once

#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/model/prefill_cost.h"

namespace spl::engine {

struct PrefillLoad {
  size_t queued_requests = 0;
  int64_t queued_tokens = 0;  // still to compute, including running prompts
  double tokens_per_s = 0;    // smoothed over long passes (PrefillMeter); the warm-up gives the first value
  // Rate of a prompt's first tokens, and the cost of a pair of a token and one in front of it in such tokens: what a
  // prompt takes grows with the square of its length (PrefillCost).
  double first_tokens_per_s = 0;
  double pair_cost = 0;
};

// The speed is that of passes of 512 tokens and more, or of the longest ones that there were. A pass of few tokens
// reads all weights for them: a worker whose prompts hit its cache would look many times slower than it is, and would
// be sent nothing that shows otherwise.
//
// Any thread.
class PrefillMeter {
 public:
  explicit PrefillMeter(const ModelConfig& config) : cost_(config) {}

  // Runs a short prompt twice: the first pass builds kernels and touches memory, the second gives a first speed.
  // InvalidArgument: the pool is too small for the prompt.
  absl::Status WarmUp(ParallelExecutor& executor, PagePool& pool);

  // Sets the tokens that a prompt still has to compute. `share` is what the prompt counted before, 0 at first.
  void SetQueued(int64_t& share, int64_t tokens);
  // Records a pass: `tokens` are rows times the share of the layers, `cost` is PrefillCost's.
  void Add(double tokens, double cost, double seconds);

  const PrefillCost& cost() const { return cost_; }
  // Time to compute positions [first, first + count) of a prompt, at the measured speed.
  double RecomputeSeconds(int64_t first, int32_t count) const;
  PrefillLoad load(size_t queued_requests) const;

 private:
  const PrefillCost cost_;
  mutable std::mutex mutex_;  // guards all below
  int64_t queued_tokens_ = 0;
  int length_ = 0;  // bits of the longest pass; shorter ones do not count
  double tokens_per_s_ = 0;
  double cost_per_s_ = 0;
};

}  // namespace spl::engine
