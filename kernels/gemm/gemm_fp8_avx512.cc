// Products with FP8 weights by VDPBF16PS: every code is exact in bf16. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_passes_avx512.h"
#include "kernels/gemm/gemm_fp8_isa.h"
#include "kernels/gemm/gemm_fp8_widen.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

// 12 rows are 24 sums; two operands, a broadcast and the constants of Widen32 take the rest of the 32 registers.
constexpr int kMostRows = 12;

struct Panel {
  static constexpr int kTiles = 2;

  const uint8_t* codes;

  const uint8_t* at(int64_t block, int pair) const { return codes + block * kBf16PairElements + pair * 32; }
  void ask(int64_t block, int pair) const {  // two pairs are a line
    AskAhead(at(block, pair) + (pair % 2 == 0 ? 0 : kBf16TileElements));
  }
  void get(int64_t block, int pair, __m512i (&w)[kTiles]) const {
    w[0] = Widen32(at(block, pair));
    w[1] = Widen32(at(block, pair) + kBf16TileElements);
  }
};

void Multiply(const Fp8Block& b) {
  MultiplyInPasses<kMostRows>(b.x, b.num_rows, b.depth_blocks, Panel{b.panel}, true, false, b.sums);
}

}  // namespace

extern const Fp8Bf16Kernels kFp8Bf16Gemm;
const Fp8Bf16Kernels kFp8Bf16Gemm = {WidenFp8, [](int64_t) {}, Multiply, [] {}};

}  // namespace spl::kernels::cpu::avx512_bf16
