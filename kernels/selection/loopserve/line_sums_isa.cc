#include "kernels/selection/loopserve/line_sums_isa.h"

#include "kernels/common/gemm_tile.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kPage = 64;

template <int kRows>
SPLICE_INLINE void Rows(const LinePage& p, int row, int column) {
  F scores[kRows][kTileColumns];
  SPLICE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SPLICE_UNROLL
    for (int c = 0; c < kTileColumns; ++c) scores[r][c] = Zero();
  }
  MultiplyTile<kRows, kTileColumns>(p.q + static_cast<int64_t>(row) * p.head_dim, p.head_dim, p.keys + column, kPage,
                                    p.head_dim, scores);
  SPLICE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SPLICE_UNROLL
    for (int c = 0; c < kTileColumns; ++c) {
      Store(p.weights + static_cast<int64_t>(row + r) * kPage + column + c * kLanes,
            Exp2(Sub(scores[r][c], Set1(p.lse[row + r]))));
    }
  }
}

void PageWeights(const LinePage& p) {
  for (int column = 0; column < kPage; column += kTileColumns * kLanes) {
    int row = 0;
    for (; row + kTileRows <= p.num_rows; row += kTileRows) Rows<kTileRows>(p, row, column);
    for (; row < p.num_rows; ++row) Rows<1>(p, row, column);
  }
}

}  // namespace

extern const LineSumsKernels kLineSums;
const LineSumsKernels kLineSums = {PageWeights};

}  // namespace spl::kernels::cpu::SPLICE_ISA
