// One sampled token for every row of an executor's last logits.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/thread_pool.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// One thread at a time.
class RowSampler {
 public:
  // samplers[i] draws from row i; null: nothing is drawn, and the token is 0. Plainly greedy rows are chosen on the
  // device; only where there are others do logits come to the host, where these rows are sampled at the same time, each
  // on a thread. Whoever chooses, the tokens are the same.
  absl::StatusOr<std::vector<SampledToken>> Sample(ParallelExecutor& executor, std::span<Sampler* const> samplers);

 private:
  std::unique_ptr<kernels::ThreadPool> pool_;  // of an executor that has none, on a GPU: made when it is first needed
};

}  // namespace spl::engine
