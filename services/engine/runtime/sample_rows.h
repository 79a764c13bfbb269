// One sampled token for every row of an executor's last logits.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// One thread at a time.
class RowSampler {
 public:
  // samplers[i] draws from row logit_rows[i], or i where none are given; null: nothing is drawn, and the token is 0.
  // Tokens are chosen where the logits are, all rows at once, whatever each of them asks for; plainly greedy rows alone
  // take the shorter way of an argmax. Whoever chooses, the tokens are the same.
  absl::StatusOr<std::vector<SampledToken>> Sample(ParallelExecutor& executor, std::span<Sampler* const> samplers,
                                                   std::span<const int32_t> logit_rows = {});
  // Begins to choose the token of each sampler, from rows in their order, behind ahead[i] tokens of it that are still
  // to be taken. REQUIRES: the executor samples_later(); a sampler with tokens ahead draws_ahead().
  absl::StatusOr<PendingSample> Begin(ParallelExecutor& executor, std::span<Sampler* const> samplers,
                                      std::span<const int32_t> ahead);
  // The first tokens of all continuations of some prompts: prompts[i], their samplers, draw from row i.
  absl::StatusOr<std::vector<std::vector<SampledToken>>> SampleFirst(ParallelExecutor& executor,
                                                                     std::span<std::vector<Sampler>> prompts);

 private:
  std::vector<kernels::SampleRow> rows_;  // of the samplers that draw
};

}  // namespace spl::engine
