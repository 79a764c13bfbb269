// Products with FP8 weights by VDPBF16PS: every code is exact in bf16. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_fp8_isa.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

constexpr int kPairs = static_cast<int>(kBf16DepthBlock / 2);

// 32 codes as bf16. The exponent field of a normal code is rebased; subnormal codes, of which bf16 makes normal values,
// come from a table.
inline __m512i Widen32(const uint8_t* codes) {
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  // 0, 2^-9, 2 · 2^-9, … 7 · 2^-9 in bf16, two a word.
  const __m512i subnormals =
      _mm512_setr_epi32(0x3b000000, 0x3bc03b80, 0x3c203c00, 0x3c603c40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)),
                                                      magnitude, subnormals);
  // value | (words & 0x8000): the sign was extended to bit 15.
  return _mm512_ternarylogic_epi32(value, words, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);
}

void Widen(const uint8_t* codes, int64_t count, bf16* out) {
  for (int64_t i = 0; i < count; i += 32) _mm512_store_si512(out + i, Widen32(codes + i));
}

template <int kRows>
void MultiplyRows(const Fp8Block& b, int64_t row) {
  const auto* x = reinterpret_cast<const int32_t*>(b.x);
  const int32_t* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = x + (row + r) * kPairs;
  __m512 c[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) c[r][0] = c[r][1] = _mm512_setzero_ps();
  for (int64_t block = 0; block < b.depth_blocks; ++block) {
    const uint8_t* codes = b.panel + block * kBf16PairElements;
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto w0 = reinterpret_cast<__m512bh>(Widen32(codes + pair * 32));
      const auto w1 = reinterpret_cast<__m512bh>(Widen32(codes + kBf16TileElements + pair * 32));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const auto xr = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows[r][block * (kBf16PairElements / 2) + pair]));
        c[r][0] = _mm512_dpbf16_ps(c[r][0], xr, w0);
        c[r][1] = _mm512_dpbf16_ps(c[r][1], xr, w1);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    _mm512_store_ps(b.sums + (row + r) * kBf16PanelColumns, c[r][0]);
    _mm512_store_ps(b.sums + (row + r) * kBf16PanelColumns + 16, c[r][1]);
  }
}

void Multiply(const Fp8Block& b) {
  int64_t row = 0;
  for (; row + 12 <= b.num_rows; row += 12) MultiplyRows<12>(b, row);
  for (; row + 4 <= b.num_rows; row += 4) MultiplyRows<4>(b, row);
  for (; row < b.num_rows; ++row) MultiplyRows<1>(b, row);
}

}  // namespace

extern const Fp8Bf16Kernels kFp8Bf16Gemm;
const Fp8Bf16Kernels kFp8Bf16Gemm = {Widen, Multiply};

}  // namespace spl::kernels::cpu::avx512_bf16
