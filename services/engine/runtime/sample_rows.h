// Samples one token for every row of an executor's last logits.
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
  // samplers[i] samples from row logit_rows[i], or from row i if none are given; null: the token is 0. Tokens are
  // chosen where the logits are, all rows at once, whatever their parameters. If all rows are plain greedy, an argmax
  // is used instead, which is faster and gives the same tokens.
  absl::StatusOr<std::vector<SampledToken>> Sample(ParallelExecutor& executor, std::span<Sampler* const> samplers,
                                                   std::span<const int32_t> logit_rows = {});
  // Starts sampling a token for each row of logits, in their order. Null: any token, which nobody takes. REQUIRES: the
  // executor samples_later(), and the samplers have taken all tokens before these.
  absl::StatusOr<PendingSample> Begin(ParallelExecutor& executor, std::span<Sampler* const> samplers);

 private:
  void FillMasks(std::span<Sampler* const> samplers);

  std::vector<kernels::SampleRow> rows_;            // one for each sampler that draws
  std::vector<Sampler*> masked_;                    // those whose mask is to be filled
  std::unique_ptr<kernels::ThreadPool> mask_pool_;  // made when there are two of them first
};

}  // namespace spl::engine
