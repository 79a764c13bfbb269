// The leaf code of CPU RoPE, compiled once per instruction set (rope_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct RopeKernels {
  // out = in rotated, all [2 * half]; out may be in. With a weight [2 * half], in is RMS-normalised first.
  void (*rotate)(const float* in, const float* weight, float eps, const float* cos, const float* sin, int32_t half,
                 float* out);
  // Row `slot` of a half page [64, width] of f32 or bf16 = in, rounded to nearest even.
  void (*store)(const float* in, int32_t width, DType dtype, int32_t slot, void* half_page);
};

SPLICE_DECLARE_ISA_TABLES(RopeKernels, kRope)

}  // namespace spl::kernels::cpu
