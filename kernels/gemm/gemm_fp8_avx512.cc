// Products with FP8 weights by VDPBF16PS: every code is exact in bf16. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_passes_avx512.h"
#include "kernels/gemm/gemm_fp8_isa.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

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
const Fp8Bf16Kernels kFp8Bf16Gemm = {Widen, Multiply};

}  // namespace spl::kernels::cpu::avx512_bf16
