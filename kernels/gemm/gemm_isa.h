// The GEMM for machines on which oneDNN has no blocked f32 product (no AVX-512), compiled once per instruction set.
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

inline constexpr int64_t kPanelColumns = 64;

struct GemmKernels {
  // y[i, 0 .. num_columns) (row stride y_stride) = x[i] · panel (+ bias); x [num_rows, depth], panel [depth, 64].
  void (*multiply_panel)(const float* x, int64_t num_rows, int64_t depth, const float* panel, const float* bias,
                         int64_t num_columns, float* y, int64_t y_stride);
};

SPLICE_DECLARE_ISA_TABLES(GemmKernels, kGemm)

}  // namespace spl::kernels::cpu
