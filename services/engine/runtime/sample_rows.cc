#include "services/engine/runtime/sample_rows.h"

#include <algorithm>
#include <iterator>
#include <thread>

#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr unsigned kMaskThreads = 8;

}  // namespace

// In the mean a mask takes 30 to 150 us, and 32 of them must not take longer than the layers of a step.
void RowSampler::FillMasks(std::span<Sampler* const> samplers) {
  masked_.clear();
  std::copy_if(samplers.begin(), samplers.end(), std::back_inserter(masked_),
               [](const Sampler* sampler) { return sampler != nullptr && sampler->needs_mask(); });
  if (masked_.size() < 2) return;
  if (mask_pool_ == nullptr) {
    const unsigned threads = std::clamp(std::thread::hardware_concurrency() / 2, 1u, kMaskThreads);
    mask_pool_ = std::make_unique<kernels::ThreadPool>(static_cast<int>(threads));
  }
  mask_pool_->ParallelFor(static_cast<int64_t>(masked_.size()), [&](int64_t i, int) { masked_[i]->FillMask(); });
}

absl::StatusOr<std::vector<SampledToken>> RowSampler::Sample(ParallelExecutor& executor,
                                                             std::span<Sampler* const> samplers,
                                                             std::span<const int32_t> logit_rows) {
  std::vector<SampledToken> sampled(samplers.size());
  FillMasks(samplers);
  rows_.clear();
  for (size_t i = 0; i < samplers.size(); ++i) {
    const int32_t row = logit_rows.empty() ? static_cast<int32_t>(i) : logit_rows[i];
    if (samplers[i] != nullptr) rows_.push_back(samplers[i]->Row(row));
  }
  if (rows_.empty()) return sampled;
  if (std::all_of(rows_.begin(), rows_.end(), [](const kernels::SampleRow& row) { return row.is_argmax(); })) {
    SPLICE_ASSIGN_OR_RETURN(const std::span<const int32_t> best, executor.Argmax());
    for (size_t i = 0, n = 0; i < samplers.size(); ++i) {
      if (samplers[i] != nullptr) sampled[i] = samplers[i]->TakeArgmax(best[rows_[n++].logits_row]);
    }
    return sampled;
  }
  SPLICE_ASSIGN_OR_RETURN(const SampledBatch batch, executor.Sample(rows_));
  for (size_t i = 0, n = 0; i < samplers.size(); ++i) {
    if (samplers[i] == nullptr) continue;
    sampled[i] = samplers[i]->Take(batch.rows[n], batch.top_of(n));
    ++n;
  }
  return sampled;
}

absl::StatusOr<PendingSample> RowSampler::Begin(ParallelExecutor& executor, std::span<Sampler* const> samplers) {
  FillMasks(samplers);
  rows_.clear();
  for (size_t i = 0; i < samplers.size(); ++i) {
    const auto row = static_cast<int32_t>(i);
    rows_.push_back(samplers[i] == nullptr ? kernels::SampleRow{.logits_row = row} : samplers[i]->Row(row));
  }
  return executor.BeginSample(rows_);
}

}  // namespace spl::engine
