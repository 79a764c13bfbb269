// Leaf code of products with FP8 weights.
//
// Packed codes  [panel][depth block][2][16 depth pairs][16 columns][2]: the order of a bf16 panel (gemm_bf16_isa.h),
// one byte an element; 0 past the edges of the weight.
//
// Order of sums  fixed for a row. Inside a scale group: Fp8GemmKernels by one FMA chain in ascending depth, the bf16
// tables in their own order. Groups ascend: total = sum * scale for the first one, then fma(sum, scale, total).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {

// Any machine; x is not rounded.
struct Fp8GemmKernels {
  // sums[r][0 .. 32) = x[r] · panel over `depth` depths; x_stride: elements between rows of x; sums [num_rows][32].
  void (*multiply)(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, const uint8_t* panel,
                   float* sums);
  // totals[r][c] = sums[r][c] * scales[c] (+ totals[r][c]) for 32 columns. totals may be sums when nothing is added.
  void (*scale)(const float* sums, int64_t num_rows, const float* scales, bool add, float* totals);
  // y[r, 0 .. num_columns) = totals[r] (+ bias); y_stride: elements between rows of y.
  void (*store)(const float* totals, int64_t num_rows, int64_t num_columns, const float* bias, float* y,
                int64_t y_stride);
};

SPLICE_DECLARE_ISA_TABLES(Fp8GemmKernels, kFp8Gemm)

// A product of some rows of one packed row block with one panel.
struct Fp8Block {
  const bf16* x = nullptr;  // packed rows, at the first depth block
  int64_t num_rows = 0;     // [1, kBf16RowBlock]
  const uint8_t* panel = nullptr;
  int64_t depth_blocks = 0;
  float* sums = nullptr;  // [32][32], 64-byte aligned, overwritten
};

// Machines with AVX512-BF16, those with AMX included; x is rounded to bf16.
struct Fp8Bf16Kernels {
  void (*widen)(const uint8_t* codes, int64_t count, bf16* out);  // count: a multiple of 64; out 64-byte aligned
  // A thread calls begin in front of products of so many rows, and end behind them.
  void (*begin)(int64_t num_rows);
  // Widens the codes beside the products: bitwise the bf16 product of the same instruction set with widened codes.
  void (*multiply)(const Fp8Block& block);
  void (*end)();
};

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Fp8Bf16Kernels kFp8Bf16Gemm;
}
namespace amx {
extern const Fp8Bf16Kernels kFp8Bf16Gemm;
}
#endif

}  // namespace spl::kernels::cpu
