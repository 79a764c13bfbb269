// A product that is added to what is there: the residual stream behind attention and behind feed-forward.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels {

// y[i, j] += g[i, j], g = x · Wᵀ. Every g is a sum in f32 before it is added: y has the bits that Linear and RmsNorm
// with a delta leave, unless Linear chooses another order of sums.
//
// On CUDA only bf16 and f32 weights, with x of the weight's type; Unimplemented with others. It reads and writes y once
// and no product; LinearWeight::PrefersAdd says where that is faster.
struct LinearAddArgs {
  ConstActivations x;                    // [num_rows, in_features], as LinearArgs.x
  const LinearWeight* weight = nullptr;  // [out_features, in_features]
  float* y = nullptr;                    // [num_rows, out_features], contiguous; neither x nor product
  float* product = nullptr;              // [num_rows, out_features]: scratch, as LinearArgs.y; undefined afterwards
  int64_t num_rows = 0;                  // 0 is a no-op

  LinearArgs Product() const { return {.x = x, .weight = weight, .y = product, .num_rows = num_rows}; }
};

// InvalidArgument: what Linear refuses, or a null or aliased y.
absl::Status ValidateLinearAdd(const LinearAddArgs& args);

namespace ref {
absl::Status LinearAdd(const KernelContext& ctx, const LinearAddArgs& args);
}
namespace cpu {
absl::Status LinearAdd(const KernelContext& ctx, const LinearAddArgs& args);
}

}  // namespace spl::kernels
