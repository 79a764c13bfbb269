// Leaf code of products with int4 weights. Scaling and storing of sums are those of FP8 (gemm_fp8_isa.h).
//
// Packed codes  [panel][depth block][16 depth pairs][32], one byte for two codes: the low four bits of byte i are
// element i of the pair in the first tile of a bf16 panel (columns 0 to 15, gemm_bf16_isa.h), the high four bits that
// in the second (columns 16 to 31); 0 past the edges of the weight.
//
// Offsets  one for each column of a panel and scale group: 16 less the zero point. Code plus offset is in [0, 31] and
// stands for itself less 16.
//
// Order of sums  as in gemm_fp8_isa.h.
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {

inline constexpr int64_t kInt4BlockBytes = kBf16PairElements / 2;  // codes of a depth block of a panel

// Any machine; x is not rounded.
struct Int4GemmKernels {
  // sums[r][0 .. 32) = x[r] · panel over `depth` depths of one scale group; x_stride: elements between rows of x;
  // offsets [32]; sums [num_rows][32].
  void (*multiply)(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, const uint8_t* panel,
                   const uint8_t* offsets, float* sums);
};

SPLICE_DECLARE_ISA_TABLES(Int4GemmKernels, kInt4Gemm)

// A product of some rows of one packed row block with one panel, inside one scale group.
struct Int4Block {
  const bf16* x = nullptr;  // packed rows, at the first depth block
  int64_t num_rows = 0;     // [1, kBf16RowBlock]
  const uint8_t* panel = nullptr;
  const uint8_t* offsets = nullptr;  // [32]
  int64_t depth_blocks = 0;
  float* sums = nullptr;  // [32][32], 64-byte aligned, overwritten
};

// Machines with AVX512-BF16, those with AMX included; x is rounded to bf16.
struct Int4Bf16Kernels {
  // Widens depth blocks of one scale group to those of a bf16 panel; out 64-byte aligned.
  void (*widen)(const uint8_t* panel, const uint8_t* offsets, int64_t depth_blocks, bf16* out);
  // A thread calls begin in front of products of so many rows, and end behind them.
  void (*begin)(int64_t num_rows);
  // Widens the codes beside the products: bitwise the bf16 product of the same instruction set with widened codes.
  void (*multiply)(const Int4Block& block);
  void (*end)();
};

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Int4Bf16Kernels kInt4Bf16Gemm;
}
namespace amx {
extern const Int4Bf16Kernels kInt4Bf16Gemm;
}
#endif

}  // namespace spl::kernels::cpu
