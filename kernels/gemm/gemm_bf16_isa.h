// The bf16 product's leaf code: one table for each instruction set that multiplies bf16.
//
// Layouts
//   tile of rows     [16 rows][32 depths], bf16, 1 KiB: 16 rows of x over one block of depths
//   packed rows      [row block][depth block][2] tiles of rows: 32 rows of x; rows and depths past the end are 0
//   tile of columns  [16 depth pairs][16 columns][2], bf16, 1 KiB: the form that TDPBF16PS and VDPBF16PS read
//   panel            [depth block][2] tiles of columns: 32 columns of the weight; 0 past its edges
//   sums             [panel][32 rows][32 columns], f32
//
// Order of sums  fixed for a row, whatever the number of rows, panels or calls: depth blocks ascend, and inside a block
// each table has the order of its instruction. amx: even depths and odd depths by one FMA chain each, then their sum is
// added to the result. avx512_bf16: pair after pair, the odd depth before the even one. Denormal inputs and results
// are 0 in both.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels::cpu {

inline constexpr int64_t kBf16TileRows = 16;
inline constexpr int64_t kBf16DepthBlock = 32;
inline constexpr int64_t kBf16TileElements = kBf16TileRows * kBf16DepthBlock;
inline constexpr int64_t kBf16PanelColumns = 32;
inline constexpr int64_t kBf16RowBlock = 32;
inline constexpr int64_t kBf16PairElements = 2 * kBf16TileElements;  // per depth block, in packed rows and in a panel
inline constexpr int64_t kBf16SumsOfPanel = kBf16RowBlock * kBf16PanelColumns;

// A product of up to 32 rows with some panels over some depth blocks.
struct Bf16Block {
  const bf16* x = nullptr;       // a row block, at the first depth block
  const bf16* next_x = nullptr;  // like x, for the rows that are multiplied next; or null
  int64_t num_rows = 0;          // [1, kBf16RowBlock]
  const bf16* w = nullptr;       // panels, at the first depth block
  int64_t w_stride = 0;          // elements from one panel to the next
  int64_t num_panels = 0;
  int64_t depth_blocks = 0;
  bool from_memory = false;  // panels are read for the first time; false: they are in a cache, mostly
  bool add = false;          // true: adds to sums; false: overwrites them
  float* sums = nullptr;     // 64-byte aligned; rows past num_rows are undefined
};

struct Bf16GemmKernels {
  // Rounds x [num_rows, depth], num_rows in [1, 32], to packed rows of one block.
  void (*pack_rows)(const float* x, int64_t num_rows, int64_t depth, bf16* out);
  void (*multiply)(const Bf16Block& block);
  // y[r, 0 .. num_columns) = sums[r] (+ bias) for one panel; y_stride: elements between rows of y.
  void (*store)(const float* sums, int64_t num_rows, int64_t num_columns, const float* bias, float* y,
                int64_t y_stride);
};

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Bf16GemmKernels kBf16Gemm;
}
namespace amx {
extern const Bf16GemmKernels kBf16Gemm;
}
#endif

}  // namespace spl::kernels::cpu
