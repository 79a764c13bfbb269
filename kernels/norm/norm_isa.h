// The leaf code of CPU RMSNorm, compiled once per instruction set (norm_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct NormKernels {
  // One row; delta may be null.
  void (*rms_norm)(float* residual, const float* delta, const float* weight, float* out, int64_t width, float eps);
};

SPLICE_DECLARE_ISA_TABLES(NormKernels, kNorm)

}  // namespace spl::kernels::cpu
