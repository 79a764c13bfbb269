#include "services/engine/runtime/sample_rows.h"

#include <algorithm>

#include "kernels/common/parallel.h"
#include "services/base/status.h"

namespace spl::engine {

absl::StatusOr<std::vector<SampledToken>> SampleRows(ParallelExecutor& executor, std::span<Sampler* const> samplers) {
  std::vector<SampledToken> sampled(samplers.size());
  if (std::all_of(samplers.begin(), samplers.end(), [](const Sampler* s) { return s->takes_argmax(); })) {
    SPLICE_ASSIGN_OR_RETURN(const std::span<const int32_t> best, executor.Argmax());
    for (size_t i = 0; i < samplers.size(); ++i) sampled[i] = samplers[i]->TakeArgmax(best[i]);
    return sampled;
  }
  SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor.Logits());
  const size_t vocab = static_cast<size_t>(executor.model().config().vocab_size);
  kernels::ParallelTasks(executor.context(), static_cast<int64_t>(samplers.size()), [&](int64_t i) {
    sampled[static_cast<size_t>(i)] =
        samplers[static_cast<size_t>(i)]->Sample(logits.subspan(static_cast<size_t>(i) * vocab, vocab));
  });
  return sampled;
}

}  // namespace spl::engine
