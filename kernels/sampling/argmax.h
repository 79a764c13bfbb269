// The most likely token of each row: greedy sampling, without copying the logits to the host.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// out[i] = the lowest j with logits[i, j] = max. NaN is never chosen; a row of nothing but NaN gives 0. values[i] =
// logits[i, out[i]], by which the winners of several ranks are compared.
struct ArgmaxArgs {
  const float* logits = nullptr;  // [num_rows, width]
  int32_t* out = nullptr;         // [num_rows]
  float* values = nullptr;        // [num_rows], or null
  int64_t num_rows = 0;
  int64_t width = 0;
};

absl::Status ValidateArgmax(const ArgmaxArgs& args);

namespace ref {
absl::Status Argmax(const KernelContext& ctx, const ArgmaxArgs& args);
}
namespace cpu {
absl::Status Argmax(const KernelContext& ctx, const ArgmaxArgs& args);
}

}  // namespace spl::kernels
