// The bf16 product by VDPBF16PS. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_bf16_passes_avx512.h"
#include "kernels/gemm/gemm_bf16_rows.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

// 14 rows of two registers are 28 sums; with two operands and a broadcast 31 of the 32 registers.
constexpr int kMostRows = 14;

template <int kPanels>
struct Panels {
  static constexpr int kTiles = 2 * kPanels;

  const bf16* w;
  int64_t stride;  // elements from one panel to the next

  const bf16* at(int64_t block, int pair, int tile) const {
    return w + tile / 2 * stride + block * kBf16PairElements + tile % 2 * kBf16TileElements + pair * 32;
  }
  void ask(int64_t block, int pair) const {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) AskAhead(at(block, pair, t));
  }
  void get(int64_t block, int pair, __m512i (&words)[kTiles]) const {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) words[t] = _mm512_loadu_si512(at(block, pair, t));
  }
};

void Multiply(const Bf16Block& b) {
  const auto multiply = [&]<int kPanels>(int64_t p) {
    MultiplyInPasses<kPanels == 1 ? kMostRows : 1>(b.x, b.num_rows, b.depth_blocks,
                                                   Panels<kPanels>{b.w + p * b.w_stride, b.w_stride}, b.from_memory,
                                                   b.add, b.sums + p * kBf16SumsOfPanel);
  };
  int64_t p = 0;
  if (b.num_rows == 1) {  // two chains of sums are too few for the latency of a product
    for (; p + 2 <= b.num_panels; p += 2) multiply.template operator()<2>(p);
  }
  for (; p < b.num_panels; ++p) multiply.template operator()<1>(p);
}

}  // namespace

extern const Bf16GemmKernels kBf16Gemm;
const Bf16GemmKernels kBf16Gemm = {PackBf16Rows, Multiply, StoreBf16Sums};

}  // namespace spl::kernels::cpu::avx512_bf16
