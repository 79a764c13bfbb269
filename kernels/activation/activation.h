// The gated feed-forward activation.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// out[i, j] = silu(gate_up[i, j]) * gate_up[i, width + j],  silu(x) = x / (1 + exp(-x)).
struct SiluMulArgs {
  ConstActivations gate_up;  // [num_rows, 2 * width]: gate, then up
  Activations out;           // [num_rows, width]; kE4M3: quantize/quantize_rows.h
  int64_t num_rows = 0;
  int64_t width = 0;
};

namespace ref {
absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& args);
}
namespace cpu {
absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& args);
}

}  // namespace spl::kernels
