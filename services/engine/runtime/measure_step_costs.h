// Measures what decode steps cost with and without a choice of tokens, for the method `adaptive`
// (selection/step_costs.h).
#pragma once

#include <chrono>

#include "absl/status/statusor.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/selection/step_costs.h"

namespace spl::engine {

// Runs steps of 1, 2, 4, ... sequences of about 4K, 8K, 16K, ... 128K positions, as far as the pool's free pages, the
// executor's rows and the model's context go; the last number of sequences is as many as fit. The pages hold random
// keys and values and are free again afterwards. Ends after about `at_most`, with what is measured by then: small
// batches come first. Engine thread, with no other pass on the executor.
// A model of which no head may choose has an empty table. Errors are those of the passes.
absl::StatusOr<StepCosts> MeasureStepCosts(ParallelExecutor& executor, PagePool& pool,
                                           std::chrono::milliseconds at_most);

}  // namespace spl::engine
