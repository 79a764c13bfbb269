// A product with the steps of a layer around it in one operation: for few rows, where a kernel of its own for each of
// them takes longer than its work (LinearWeight::Fuses).
#pragma once

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels {

// Without fusion this is Linear. The result has the bits of the single operations:
//   norm      x is f32 [num_rows, in_features]. The product takes RmsNorm of it (norm/norm.h), which is rounded to the
//             activation type of the backend. x is not changed
//   silu_mul  y [num_rows, out_features / 2] is SiluMul of the product in f32 (activation/activation.h)
//   adds      y is f32 and the result is added to it. Not with silu_mul
// The host serves every weight; a CUDA device FP8 and int4 weights and numbers of rows for which Fuses names the step,
// and a few more. Unimplemented or an error of the launcher otherwise; then nothing ran.
struct FusedLinearArgs {
  LinearArgs linear;
  LinearFusion fusion;
};

// OK also for args that a device does not serve.
absl::Status ValidateFusedLinear(const FusedLinearArgs& args);

namespace ref {
absl::Status FusedLinear(const KernelContext& ctx, const FusedLinearArgs& args);
}
namespace cpu {  // one operation after the other; allocates what is between them
absl::Status FusedLinear(const KernelContext& ctx, const FusedLinearArgs& args);
}

}  // namespace spl::kernels
