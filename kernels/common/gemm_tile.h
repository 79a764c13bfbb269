// Register-blocked product: the core of attention's two matrix products, and of the GEMM without oneDNN. For *_isa.cc
// files; see simd.h.
#pragma once

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {

// Rows per tile. With kTileColumns operands and one broadcast the sums fill the register file, and 6 · kTileColumns
// independent FMA chains cover the latency (4 cycles) of two FMA units.
inline constexpr int kTileRows = 6;

// sums[r][c] += Σ_k a[r · lda + k] · b[k · ldb + c · kLanes …]. Each sum is one FMA chain in ascending k: its value
// does not depend on kRows or kColumns, so a row's result does not depend on the rows that share its tile.
template <int kRows, int kColumns>
SPLICE_INLINE void MultiplyTile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                                F (&sums)[kRows][kColumns]) {
  for (int64_t k = 0; k < depth; ++k) {
    F operand[kColumns];
    SPLICE_UNROLL
    for (int c = 0; c < kColumns; ++c) operand[c] = Load(b + k * ldb + c * kLanes);
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F factor = Set1(a[r * lda + k]);
      SPLICE_UNROLL
      for (int c = 0; c < kColumns; ++c) sums[r][c] = Fma(factor, operand[c], sums[r][c]);
    }
  }
}

}  // namespace spl::kernels::cpu::SPLICE_ISA
