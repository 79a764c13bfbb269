// Executor's choice of tokens from its last logits.
#include <algorithm>
#include <bit>

#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {

absl::StatusOr<SampledBatch> Executor::Sample(std::span<const kernels::SampleRow> rows) {
  int32_t stride = 0;
  for (const kernels::SampleRow& row : rows) stride = std::max(stride, row.num_top);
  const size_t num_top = rows.size() * static_cast<size_t>(stride);
  const size_t read_back = rows.size() * sizeof(kernels::SampledRow) + num_top * sizeof(kernels::TopToken);
  // For the next larger batch, too: to grow means to wait for the device.
  SPLICE_RETURN_IF_ERROR(Grow(ws_.sampled, std::bit_ceil(read_back + rows.size() * sizeof(int32_t))));
  auto* const base = static_cast<std::byte*>(ws_.sampled->data());
  kernels::SampleTokensArgs args{.logits = static_cast<const float*>(ws_.logits->data()),
                                 .num_logit_rows = num_logit_rows_,
                                 .width = model_->vocab().size(),
                                 .rows = rows,
                                 .tokens = reinterpret_cast<int32_t*>(base + read_back),
                                 .out = reinterpret_cast<kernels::SampledRow*>(base),
                                 .top_stride = stride};
  args.top = reinterpret_cast<kernels::TopToken*>(args.out + rows.size());
  SPLICE_RETURN_IF_ERROR(model_->backend().SampleTokens(context(), args));
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(base, read_back));
  const auto* const sampled = static_cast<const kernels::SampledRow*>(host);
  return SampledBatch{
      {sampled, rows.size()}, {reinterpret_cast<const kernels::TopToken*>(sampled + rows.size()), num_top}, stride};
}

}  // namespace spl::engine
