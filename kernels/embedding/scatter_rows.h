// The inverse of GatherRows: writes results of some rows to their places, and zeros to the others (sparse feed-forward:
// docs/methods/redknot.md, "Sparse feed-forward", Z[S] = FFN(Y[S]), Z[~S] = 0).
//
//   out[ids[i]] = rows[i];  out[r] = 0 for every other r in [0, num_out_rows)
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

struct ScatterRowsArgs {
  const float* rows = nullptr;   // [ids.size(), width]
  std::span<const int32_t> ids;  // host memory; ascending, each in [0, num_out_rows)
  int64_t num_out_rows = 0;
  int64_t width = 0;     // a multiple of 4
  float* out = nullptr;  // [num_out_rows, width], not `rows`
};

// InvalidArgument: ids out of order or range, a null pointer.
absl::Status ValidateScatterRows(const ScatterRowsArgs& args);

namespace ref {
absl::Status ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& args);
}
namespace cpu {
absl::Status ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& args);
}

}  // namespace spl::kernels
