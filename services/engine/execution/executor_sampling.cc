// Executor's choice of tokens from its last logits.
#include <algorithm>
#include <bit>
#include <utility>

#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {

absl::StatusOr<SampledBatch> PendingSample::Wait() {
  if (copy_ == nullptr) return SampledBatch{};
  SPLICE_ASSIGN_OR_RETURN(const void* host, copy_->Wait());
  const auto* const sampled = static_cast<const kernels::SampledRow*>(host);
  return SampledBatch{
      {sampled, num_rows_},
      {reinterpret_cast<const kernels::TopToken*>(sampled + num_rows_), num_rows_ * static_cast<size_t>(top_stride_)},
      top_stride_};
}

absl::StatusOr<PendingSample> Executor::BeginSample(std::span<const kernels::SampleRow> rows) {
  int32_t stride = 0;
  for (const kernels::SampleRow& row : rows) stride = std::max(stride, row.num_top);
  const size_t num_top = rows.size() * static_cast<size_t>(stride);
  const size_t bytes = rows.size() * sizeof(kernels::SampledRow) + num_top * sizeof(kernels::TopToken);
  // For the next larger batch, too: to grow means to wait for the device.
  SPLICE_RETURN_IF_ERROR(Grow(ws_.sampled, std::bit_ceil(bytes)));
  const bool fits = rows.size() <= static_cast<size_t>(options_.max_rows);
  kernels::SampleTokensArgs args{.logits = static_cast<const float*>(ws_.logits->data()),
                                 .num_logit_rows = num_logit_rows_,
                                 .width = model_->vocab().size(),
                                 .rows = rows,
                                 .tokens = fits ? static_cast<int32_t*>(ws_.tokens->data()) : nullptr,
                                 .out = static_cast<kernels::SampledRow*>(ws_.sampled->data()),
                                 .top_stride = stride};
  args.top = reinterpret_cast<kernels::TopToken*>(args.out + rows.size());
  SPLICE_RETURN_IF_ERROR(model_->backend().SampleTokens(context(), args));
  SPLICE_ASSIGN_OR_RETURN(auto copy, session_->ReadBackLater(args.out, bytes));
  return PendingSample(std::move(copy), rows.size(), stride);
}

absl::StatusOr<SampledBatch> Executor::Sample(std::span<const kernels::SampleRow> rows) {
  SPLICE_ASSIGN_OR_RETURN(last_sample_, BeginSample(rows));
  return last_sample_.Wait();
}

}  // namespace spl::engine
