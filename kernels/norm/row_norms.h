// The length of each row: how much a token's attention adds to the residual stream. Sparse feed-forward chooses its
// rows by it (RedKnot 3.3; docs/methods/redknot.md, "Sparse feed-forward", imp_i).
//
//   out_i = sqrt(Σ_c x_ic²)
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

struct RowNormsArgs {
  ConstActivations x;  // [num_rows, width], contiguous; f32 on the CPU, f32 or bf16 on a device
  int64_t num_rows = 0;
  int64_t width = 0;     // a multiple of 4
  float* out = nullptr;  // [num_rows]
};

// InvalidArgument: a number out of range, a null pointer.
absl::Status ValidateRowNorms(const RowNormsArgs& args);

// f32 sums whose order depends on the width alone (double in the reference): a row's result is the same in any batch.
namespace ref {
absl::Status RowNorms(const KernelContext& ctx, const RowNormsArgs& args);
}
namespace cpu {
absl::Status RowNorms(const KernelContext& ctx, const RowNormsArgs& args);
}

}  // namespace spl::kernels
