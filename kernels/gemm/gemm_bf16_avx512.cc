// The bf16 product by VDPBF16PS. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_bf16_rows.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

constexpr int kPairs = static_cast<int>(kBf16DepthBlock / 2);
constexpr int kTileWords = static_cast<int>(kBf16TileElements / 2);  // a word: two bf16

// kRows rows from `row` on of one panel. 12 rows of two registers are 24 sums, two operands and a broadcast: 27 of the
// 32 registers, and more chains than the latency of two units needs.
template <int kRows>
void MultiplyRows(const Bf16Block& b, int64_t row, const int32_t* w, float* sums) {
  const auto* x = reinterpret_cast<const int32_t*>(b.x);
  const int32_t* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x + (row + r) * kPairs;
  }
  __m512 c[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    c[r][0] = b.add ? _mm512_load_ps(sums + (row + r) * kBf16PanelColumns) : _mm512_setzero_ps();
    c[r][1] = b.add ? _mm512_load_ps(sums + (row + r) * kBf16PanelColumns + 16) : _mm512_setzero_ps();
  }
  for (int64_t block = 0; block < b.depth_blocks; ++block) {
    const int32_t* tile = w + block * 2 * kTileWords;
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto w0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile + pair * 16));
      const auto w1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile + kTileWords + pair * 16));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const auto xr = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows[r][block * 2 * kTileWords + pair]));
        c[r][0] = _mm512_dpbf16_ps(c[r][0], xr, w0);
        c[r][1] = _mm512_dpbf16_ps(c[r][1], xr, w1);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    _mm512_store_ps(sums + (row + r) * kBf16PanelColumns, c[r][0]);
    _mm512_store_ps(sums + (row + r) * kBf16PanelColumns + 16, c[r][1]);
  }
}

void Multiply(const Bf16Block& b) {
  for (int64_t p = 0; p < b.num_panels; ++p) {
    const auto* w = reinterpret_cast<const int32_t*>(b.w + p * b.w_stride);
    float* sums = b.sums + p * kBf16SumsOfPanel;
    int64_t row = 0;
    for (; row + 12 <= b.num_rows; row += 12) MultiplyRows<12>(b, row, w, sums);
    for (; row + 4 <= b.num_rows; row += 4) MultiplyRows<4>(b, row, w, sums);
    for (; row < b.num_rows; ++row) MultiplyRows<1>(b, row, w, sums);
  }
}

}  // namespace

extern const Bf16GemmKernels kBf16Gemm;
const Bf16GemmKernels kBf16Gemm = {PackBf16Rows, Multiply, StoreBf16Sums};

}  // namespace spl::kernels::cpu::avx512_bf16
