// Sampled tokens that are still on their way from the device to the host.
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

// Must be destroyed before its executor. Used by the executor's thread.
class PendingSample {
 public:
  PendingSample() = default;  // no rows
  PendingSample(std::unique_ptr<kernels::HostCopy> copy, size_t num_rows, int32_t top_stride)
      : copy_(std::move(copy)), num_rows_(num_rows), top_stride_(top_stride) {}

  // Waits for the tokens, which are valid as long as this object. Also returns an error of the pass that computed them.
  absl::StatusOr<SampledBatch> Wait();

 private:
  std::unique_ptr<kernels::HostCopy> copy_;  // SampledRow of each row, then its alternatives
  size_t num_rows_ = 0;
  int32_t top_stride_ = 0;
};

}  // namespace spl::engine
