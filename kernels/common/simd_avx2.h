// AVX2 + FMA + F16C: 8 lanes. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace spl::kernels::cpu::SPLICE_ISA {

using F = __m256;
inline constexpr int kLanes = 8;
inline constexpr int kTileColumns = 2;  // 6 x 2 sums, 2 operands, 1 broadcast = 15 of 16 registers

SPLICE_INLINE __m256i FirstLanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

SPLICE_INLINE F Zero() { return _mm256_setzero_ps(); }
SPLICE_INLINE F Set1(float x) { return _mm256_set1_ps(x); }
SPLICE_INLINE F Load(const float* p) { return _mm256_loadu_ps(p); }
SPLICE_INLINE void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
SPLICE_INLINE F LoadPartial(const float* p, int n) { return _mm256_maskload_ps(p, FirstLanes(n)); }
SPLICE_INLINE void StorePartial(float* p, F v, int n) { _mm256_maskstore_ps(p, FirstLanes(n), v); }
SPLICE_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
SPLICE_INLINE F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
SPLICE_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
SPLICE_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
SPLICE_INLINE F Max(F a, F b) { return _mm256_max_ps(a, b); }
SPLICE_INLINE F Min(F a, F b) { return _mm256_min_ps(a, b); }
SPLICE_INLINE F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
SPLICE_INLINE F Round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n whole, in [-126, 126]: added to the exponent field.
SPLICE_INLINE F ScaleByPowerOfTwo(F a, F n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
SPLICE_INLINE float ReduceAdd(F a) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
SPLICE_INLINE float FirstLane(F a) { return _mm256_cvtss_f32(a); }
SPLICE_INLINE float ReduceMax(F a) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

SPLICE_INLINE F Select(uint32_t bits, F a, F b) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
}

SPLICE_INLINE __m128i LoadHalves(const void* p, int n) {
  if (n == kLanes) return _mm_loadu_si128(static_cast<const __m128i*>(p));
  alignas(16) uint16_t padded[kLanes] = {};
  for (int i = 0; i < n; ++i) padded[i] = static_cast<const uint16_t*>(p)[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(padded));
}
SPLICE_INLINE F LoadBf16(const bf16* p, int n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(LoadHalves(p, n)), 16));
}
SPLICE_INLINE F LoadF16(const uint16_t* p, int n) { return _mm256_cvtph_ps(LoadHalves(p, n)); }
SPLICE_INLINE void StoreBf16(bf16* p, F v, int n) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, nan, is_nan);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  if (n == kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
    return;
  }
  alignas(16) uint16_t padded[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(padded), halves);
  for (int i = 0; i < n; ++i) p[i].bits = padded[i];
}

SPLICE_INLINE F LoadWords(const void* p, int n) {
  return _mm256_castsi256_ps(_mm256_maskload_epi32(static_cast<const int*>(p), FirstLanes(n)));
}
SPLICE_INLINE F LowBf16(F words) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16)); }
SPLICE_INLINE F HighBf16(F words) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_castps_si256(words), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Values of the e4m3 codes in the low 8 bits of each lane; higher bits do not matter.
SPLICE_INLINE F E4M3ToFloat(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
  const __m256 normal =
      _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23)));
  const __m256 subnormals = _mm256_permutevar8x32_ps(
      _mm256_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f), magnitude);
  const __m256 small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude));
  return _mm256_or_ps(_mm256_blendv_ps(normal, subnormals, small),
                      _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(codes, 24),
                                                           _mm256_set1_epi32(static_cast<int>(0x80000000u)))));
}
// The 2 kLanes codes at p: those at even and at odd places.
SPLICE_INLINE void LoadE4M3Pairs(const uint8_t* p, F& even, F& odd) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  even = E4M3ToFloat(words);
  odd = E4M3ToFloat(_mm256_srli_epi32(words, 8));
}
SPLICE_INLINE F E4M3Byte(F words, int byte) {
  return E4M3ToFloat(_mm256_srl_epi32(_mm256_castps_si256(words), _mm_cvtsi32_si128(8 * byte)));
}
SPLICE_INLINE F LoadE4M3(const uint8_t* p, int n) {
  alignas(8) uint8_t padded[kLanes] = {};
  if (n < kLanes) {
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    p = padded;
  }
  return E4M3ToFloat(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
SPLICE_INLINE void StoreE4M3(uint8_t* p, F v, int n) {
  const __m256i u = _mm256_castps_si256(v), any = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i m = _mm256_min_epi32(any, _mm256_set1_epi32(0x43e00000));  // 448
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(m, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(m, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
  const __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(m), _mm256_set1_ps(0x1p14f));
  const __m256i subnormal = _mm256_and_si256(_mm256_castps_si256(shifted), _mm256_set1_epi32(0xf));
  __m256i code = _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), m));
  code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), _mm256_cmpgt_epi32(any, _mm256_set1_epi32(0x7f800000)));
  code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80)));
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  alignas(16) uint8_t bytes[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(halves, halves));
  for (int i = 0; i < n; ++i) p[i] = bytes[i];
}

// The int4 codes in 2 kLanes bytes at p, those of even and of odd bytes; shift: 0 or 4, which half of a byte.
SPLICE_INLINE void LoadInt4Pairs(const uint8_t* p, int shift, F& even, F& odd) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const auto codes = [&](int by) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(words, _mm_cvtsi32_si128(by)), _mm256_set1_epi32(15)));
  };
  even = codes(shift);
  odd = codes(shift + 8);
}

SPLICE_INLINE void Transpose(F (&r)[8]) {
  F t[8];
  SPLICE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[i], r[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r[i], r[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r[i + 2], r[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[i + 2], r[i + 3]));
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  SPLICE_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

SPLICE_INLINE void ReduceAdd4(const F (&v)[4], float* out) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}

// Into the first-level cache; into the second.
SPLICE_INLINE void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
SPLICE_INLINE void PrefetchFar(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace spl::kernels::cpu::SPLICE_ISA
