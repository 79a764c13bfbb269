// Tokens that a device chooses, on their way to the host.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/backend/session.h"
#include "kernels/sampling/sample_tokens.h"

namespace spl::engine {

// Sampled tokens of some rows, on the host.
struct SampledBatch {
  std::span<const kernels::SampledRow> rows;
  std::span<const kernels::TopToken> top;  // [rows, top_stride]
  int32_t top_stride = 0;

  std::span<const kernels::TopToken> top_of(size_t row) const {
    const auto stride = static_cast<size_t>(top_stride);
    return top.subspan(row * stride, stride);
  }
};

// Ends before its executor. One thread, the executor's.
class PendingSample {
 public:
  PendingSample() = default;  // of no rows
  PendingSample(std::unique_ptr<kernels::HostCopy> copy, size_t num_rows, int32_t top_stride)
      : copy_(std::move(copy)), num_rows_(num_rows), top_stride_(top_stride) {}

  // Waits for the tokens, which are valid as long as this object. An error of the pass that they come from is told
  // here.
  absl::StatusOr<SampledBatch> Wait();

 private:
  std::unique_ptr<kernels::HostCopy> copy_;  // SampledRow of each row, then its alternatives
  size_t num_rows_ = 0;
  int32_t top_stride_ = 0;
};

}  // namespace spl::engine
