// RMSNorm, alone or fused with the residual add before it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// residual += delta (when delta is given); out = residual / sqrt(mean(residual²) + eps) * weight, row by row.
struct RmsNormArgs {
  float* residual = nullptr;      // [num_rows, width]; changed only when delta is given
  ConstActivations delta;         // [num_rows, width] or null
  const float* weight = nullptr;  // [width]
  Activations out;                // [num_rows, width]; may not alias residual. kE4M3: quantize/quantize_rows.h
  int64_t num_rows = 0;
  int64_t width = 0;
  float eps = 1e-5f;
};

namespace ref {
absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& args);
}
namespace cpu {
absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& args);
}

}  // namespace spl::kernels
