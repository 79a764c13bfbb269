// The leaf code of the CPU align copy, compiled once per instruction set (align_copy_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct AlignCopyKernels {
  // Rows [num_tokens, width] of f32 or bf16: pairs (c, c + half) turned by cos[c], sin[c]; elements from 2 * half on
  // copied. `to` may be `from`.
  void (*rotate_rows)(const void* from, DType dtype, int32_t num_tokens, int32_t width, const float* cos,
                      const float* sin, int32_t half, void* to);
};

SPLICE_DECLARE_ISA_TABLES(AlignCopyKernels, kAlignCopy)

}  // namespace spl::kernels::cpu
