#include "services/engine/runtime/sample_rows.h"

#include <algorithm>
#include <thread>

#include "kernels/common/parallel.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr int kMaxThreads = 16;  // of an own pool: a row takes 2 ms, a step of 64 rows then 8

}  // namespace

absl::StatusOr<std::vector<SampledToken>> RowSampler::Sample(ParallelExecutor& executor,
                                                             std::span<Sampler* const> samplers) {
  std::vector<SampledToken> sampled(samplers.size());
  std::vector<size_t> greedy, drawn;
  for (size_t i = 0; i < samplers.size(); ++i) {
    if (samplers[i] != nullptr) (samplers[i]->takes_argmax() ? greedy : drawn).push_back(i);
  }
  if (!greedy.empty()) {
    SPLICE_ASSIGN_OR_RETURN(const std::span<const int32_t> best, executor.Argmax());
    for (const size_t i : greedy) sampled[i] = samplers[i]->TakeArgmax(best[i]);
  }
  if (drawn.empty()) return sampled;
  SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor.Logits());
  const auto vocab = static_cast<size_t>(executor.model().config().vocab_size);
  kernels::KernelContext context = executor.context();
  if (context.pool == nullptr && drawn.size() > 1) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    if (pool_ == nullptr) pool_ = std::make_unique<kernels::ThreadPool>(std::clamp(cores, 1, kMaxThreads));
    context.pool = pool_.get();
  }
  kernels::ParallelTasks(context, static_cast<int64_t>(drawn.size()), [&](int64_t task) {
    const size_t i = drawn[static_cast<size_t>(task)];
    sampled[i] = samplers[i]->Sample(logits.subspan(i * vocab, vocab));
  });
  return sampled;
}

}  // namespace spl::engine
