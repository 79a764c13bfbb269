#include "kernels/gemm/gemm_isa.h"

#include "kernels/common/gemm_tile.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kColumnsPerTile = kTileColumns * kLanes;

template <int kRows>
void MultiplyRows(const float* x, int64_t depth, const float* panel, const float* bias, int num_columns, float* y,
                  int64_t y_stride) {
  for (int column = 0; column < num_columns; column += kColumnsPerTile) {
    F sums[kRows][kTileColumns];
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SPLICE_UNROLL
      for (int c = 0; c < kTileColumns; ++c) sums[r][c] = Zero();
    }
    MultiplyTile<kRows, kTileColumns>(x, depth, panel + column, kPanelColumns, depth, sums);
    SPLICE_UNROLL
    for (int c = 0; c < kTileColumns; ++c) {
      const int left = num_columns - column - c * kLanes;
      if (left <= 0) break;
      const int n = left < kLanes ? left : kLanes;
      const F add = bias != nullptr ? LoadPartial(bias + column + c * kLanes, n) : Zero();
      SPLICE_UNROLL
      for (int r = 0; r < kRows; ++r) StorePartial(y + r * y_stride + column + c * kLanes, Add(sums[r][c], add), n);
    }
  }
}

void MultiplyPanel(const float* x, int64_t num_rows, int64_t depth, const float* panel, const float* bias,
                   int64_t num_columns, float* y, int64_t y_stride) {
  const int n = static_cast<int>(num_columns);
  int64_t row = 0;
  for (; row + kTileRows <= num_rows; row += kTileRows) {
    MultiplyRows<kTileRows>(x + row * depth, depth, panel, bias, n, y + row * y_stride, y_stride);
  }
  for (; row < num_rows; ++row) MultiplyRows<1>(x + row * depth, depth, panel, bias, n, y + row * y_stride, y_stride);
}

}  // namespace

extern const GemmKernels kGemm;
const GemmKernels kGemm = {MultiplyPanel};

}  // namespace spl::kernels::cpu::SPLICE_ISA
