#include "kernels/selection/sparsex/column_scores_isa.h"

#include "kernels/common/gemm_tile.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kPage = 64;
constexpr int kColumns = kTileColumns;  // vectors of columns at a time

// Rows are added in ascending order whatever the tile, so a sum does not depend on how rows are cut.
template <int kRows>
SPLICE_INLINE void AddRows(const ColumnPage& p, int row, int column) {
  F scores[kRows][kColumns];
  SPLICE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    SPLICE_UNROLL
    for (int c = 0; c < kColumns; ++c) scores[r][c] = Zero();
  }
  MultiplyTile<kRows, kColumns>(p.q + static_cast<int64_t>(row) * p.head_dim, p.head_dim, p.keys + column, kPage,
                                p.head_dim, scores);
  constexpr uint32_t kLaneBits = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);
  SPLICE_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    F sum = Load(p.sums + column + c * kLanes);
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto bits = static_cast<uint32_t>(p.visible[row + r] >> (column + c * kLanes)) & kLaneBits;
      sum = Add(sum, Select(bits, Exp2(Sub(scores[r][c], Set1(p.lse[row + r]))), Zero()));
    }
    Store(p.sums + column + c * kLanes, sum);
  }
}

void AddPage(const ColumnPage& p) {
  for (int column = 0; column < kPage; column += kColumns * kLanes) {
    int row = 0;
    for (; row + kTileRows <= p.num_rows; row += kTileRows) AddRows<kTileRows>(p, row, column);
    for (; row < p.num_rows; ++row) AddRows<1>(p, row, column);
  }
}

}  // namespace

extern const ColumnScoresKernels kColumnScores;
const ColumnScoresKernels kColumnScores = {AddPage};

}  // namespace spl::kernels::cpu::SPLICE_ISA
