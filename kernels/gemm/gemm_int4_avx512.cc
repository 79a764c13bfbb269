// Products with int4 weights by VDPBF16PS: a code less its zero point is exact in bf16. Compiled with AVX-512 and its
// BF16 extension; leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_passes_avx512.h"
#include "kernels/gemm/gemm_int4_isa.h"
#include "kernels/gemm/gemm_int4_widen.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

// 12 rows are 24 sums; two operands, a broadcast and the constants of Int4Widener take the rest of the 32 registers.
constexpr int kMostRows = 12;

struct Panel {
  static constexpr int kTiles = 2;

  const uint8_t* codes;
  Int4Widener widener;

  const uint8_t* at(int64_t block, int pair) const { return codes + block * kInt4BlockBytes + pair * 32; }
  void ask(int64_t block, int pair) const {  // two pairs are a line
    if (pair % 2 == 0) AskAhead(at(block, pair));
  }
  void get(int64_t block, int pair, __m512i (&w)[kTiles]) const { widener.Pair(at(block, pair), w[0], w[1]); }
};

void Multiply(const Int4Block& b) {
  MultiplyInPasses<kMostRows>(b.x, b.num_rows, b.depth_blocks, Panel{b.panel, Int4Widener(b.offsets)}, true, false,
                              b.sums);
}

}  // namespace

extern const Int4Bf16Kernels kInt4Bf16Gemm;
const Int4Bf16Kernels kInt4Bf16Gemm = {WidenInt4, [](int64_t) {}, Multiply, [] {}};

}  // namespace spl::kernels::cpu::avx512_bf16
