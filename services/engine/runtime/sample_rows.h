// One sampled token for every row of an executor's last logits.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/model/parallel_executor.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// samplers[i] draws from row i. When every row is plainly greedy the device chooses and the logits stay there;
// otherwise they come to the host and the rows are sampled over the executor's threads. Both give the same tokens.
absl::StatusOr<std::vector<SampledToken>> SampleRows(ParallelExecutor& executor, std::span<Sampler* const> samplers);

}  // namespace spl::engine
