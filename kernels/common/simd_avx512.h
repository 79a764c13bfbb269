// AVX-512 (F, BW, VL, DQ): 16 lanes. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace spl::kernels::cpu::SPLICE_ISA {

using F = __m512;
inline constexpr int kLanes = 16;
inline constexpr int kTileColumns =
    4;  // registers per row of a GEMM tile: 6 x 4 sums, 4 operands, 1 broadcast = 29 of 32

SPLICE_INLINE __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

SPLICE_INLINE F Zero() { return _mm512_setzero_ps(); }
SPLICE_INLINE F Set1(float x) { return _mm512_set1_ps(x); }
SPLICE_INLINE F Load(const float* p) { return _mm512_loadu_ps(p); }
SPLICE_INLINE void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
SPLICE_INLINE F LoadPartial(const float* p, int n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
SPLICE_INLINE void StorePartial(float* p, F v, int n) { _mm512_mask_storeu_ps(p, FirstLanes(n), v); }
SPLICE_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
SPLICE_INLINE F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
SPLICE_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
SPLICE_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
SPLICE_INLINE F Max(F a, F b) { return _mm512_max_ps(a, b); }
SPLICE_INLINE F Min(F a, F b) { return _mm512_min_ps(a, b); }
SPLICE_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SPLICE_INLINE F Round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SPLICE_INLINE F ScaleByPowerOfTwo(F a, F n) { return _mm512_scalef_ps(a, n); }
SPLICE_INLINE float ReduceAdd(F a) { return _mm512_reduce_add_ps(a); }
SPLICE_INLINE float FirstLane(F a) { return _mm512_cvtss_f32(a); }
SPLICE_INLINE float ReduceMax(F a) { return _mm512_reduce_max_ps(a); }

// Lane i is a where bit i of bits is set, else b.
SPLICE_INLINE F Select(uint32_t bits, F a, F b) { return _mm512_mask_mov_ps(b, static_cast<__mmask16>(bits), a); }

SPLICE_INLINE F LoadBf16(const bf16* p, int n) {
  const __m256i h = n == kLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                : _mm256_maskz_loadu_epi16(FirstLanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
SPLICE_INLINE F LoadF16(const uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(FirstLanes(n), p));
}
// Rounds to nearest even; NaN stays NaN.
SPLICE_INLINE void StoreBf16(bf16* p, F v, int n) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  _mm256_mask_storeu_epi16(p, FirstLanes(n), _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, nan)));
}

// Bit patterns of 32-bit words as F; lanes past n are 0 and not read.
SPLICE_INLINE F LoadWords(const void* p, int n) {
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(FirstLanes(n), p));
}
// The two bf16 of each 32-bit word, widened: the one at the lower address, the one at the higher.
SPLICE_INLINE F LowBf16(F words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words), 16)); }
SPLICE_INLINE F HighBf16(F words) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(words), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Values of the e4m3 codes in the low 7 bits and bit 7 of each lane; higher bits do not matter.
SPLICE_INLINE F E4M3ToFloat(__m512i codes) {
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
  const __m512 normal =
      _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23)));
  const __m512 subnormals =
      _mm512_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512 value = _mm512_mask_permutexvar_ps(normal, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)),
                                                  magnitude, subnormals);
  return _mm512_or_ps(value, _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(codes, 24),
                                                                  _mm512_set1_epi32(static_cast<int>(0x80000000u)))));
}
// The 2 kLanes codes at p: those at even and at odd places.
SPLICE_INLINE void LoadE4M3Pairs(const uint8_t* p, F& even, F& odd) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  even = E4M3ToFloat(words);
  odd = E4M3ToFloat(_mm512_srli_epi32(words, 8));
}
// Byte 0, 1, 2 or 3 of each 32-bit word as an e4m3 code, widened.
SPLICE_INLINE F E4M3Byte(F words, int byte) {
  return E4M3ToFloat(_mm512_srl_epi32(_mm512_castps_si512(words), _mm_cvtsi32_si128(8 * byte)));
}
// The n codes at p in [1, kLanes], in order; lanes past n are 0 and not read.
SPLICE_INLINE F LoadE4M3(const uint8_t* p, int n) {
  return E4M3ToFloat(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(FirstLanes(n), p)));
}
// FloatToE4M3 of e4m3.h for n lanes.
SPLICE_INLINE void StoreE4M3(uint8_t* p, F v, int n) {
  const __m512i u = _mm512_castps_si512(v), any = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
  const __m512i m = _mm512_min_epi32(any, _mm512_set1_epi32(0x43e00000));  // 448
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(m, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(m, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
  const __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(m), _mm512_set1_ps(0x1p14f));
  code = _mm512_mask_and_epi32(code, _mm512_cmplt_epi32_mask(m, _mm512_set1_epi32(0x3c800000)),
                               _mm512_castps_si512(shifted), _mm512_set1_epi32(0xf));
  code =
      _mm512_mask_mov_epi32(code, _mm512_cmpgt_epi32_mask(any, _mm512_set1_epi32(0x7f800000)), _mm512_set1_epi32(0x7f));
  code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80)));
  _mm_mask_storeu_epi8(p, FirstLanes(n), _mm512_cvtepi32_epi8(code));
}

// The int4 codes in 2 kLanes bytes at p, those of even and of odd bytes; shift: 0 or 4, which half of a byte.
SPLICE_INLINE void LoadInt4Pairs(const uint8_t* p, int shift, F& even, F& odd) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const auto codes = [&](int by) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(words, _mm_cvtsi32_si128(by)), _mm512_set1_epi32(15)));
  };
  even = codes(shift);
  odd = codes(shift + 8);
}

// r[i] lane j  <->  r[j] lane i.
SPLICE_INLINE void Transpose(F (&r)[16]) {
  F t[16];
  SPLICE_UNROLL
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 transposes inside the 128-bit quarters
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[i], r[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[i], r[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[i + 2], r[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[i + 2], r[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  SPLICE_UNROLL
  for (int i = 0; i < 4; ++i) {  // then a 4 x 4 transpose of the quarters
    const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const F c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// out[i] = sum of the lanes of v[i].
SPLICE_INLINE void ReduceAdd4(const F (&v)[4], float* out) {
  __m128 q[4];
  SPLICE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    q[i] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  }
  _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(q[0], q[1]), _mm_hadd_ps(q[2], q[3])));
}

// Into the first-level cache; into the second.
SPLICE_INLINE void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
SPLICE_INLINE void PrefetchFar(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace spl::kernels::cpu::SPLICE_ISA
