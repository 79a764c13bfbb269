// The first half of a gated feed-forward: the product of gate and up, and its activation.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/activation/activation.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels {

// SiluMul of Linear: out[i, j] = silu(g[i, j]) * g[i, width + j], g = x · Wᵀ. A CUDA device may keep g in registers;
// then it is f32, whatever the type of gate_up.
struct LinearSiluMulArgs {
  ConstActivations x;                    // [num_rows, in_features], as LinearArgs.x
  const LinearWeight* weight = nullptr;  // [2 * width, in_features]: gate, then up
  Activations gate_up;                   // [num_rows, 2 * width]: scratch, as LinearArgs.y; undefined afterwards
  Activations out;                       // [num_rows, width], as SiluMulArgs.out
  int64_t num_rows = 0;                  // 0 is a no-op

  LinearArgs Product() const { return {.x = x, .weight = weight, .y = gate_up, .num_rows = num_rows}; }
  SiluMulArgs Activation() const {
    return {.gate_up = gate_up, .out = out, .num_rows = num_rows, .width = weight->out_features() / 2};
  }
};

// InvalidArgument: an odd number of features, or what Linear and SiluMul refuse.
absl::Status ValidateLinearSiluMul(const LinearSiluMulArgs& args);

namespace ref {
absl::Status LinearSiluMul(const KernelContext& ctx, const LinearSiluMulArgs& args);
}
namespace cpu {
absl::Status LinearSiluMul(const KernelContext& ctx, const LinearSiluMulArgs& args);
}

}  // namespace spl::kernels
