// Codes of e4m3 as a step of attention reads them: each as half the bits of a 16-bit float, which the machine widens by
// itself, subnormals included. For decode_attention_isa.cc only.
#pragma once

#include <cstdint>

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {

// f16 has one bit of exponent more than e4m3, so a code's bits in their places there are its value times 2^-8 (the
// biases are 15 and 7). Sums are multiplied with this, together with the scale of their row: exact, as that is. Codes
// of NaN are 480: their row has the scale of NaN.
#if defined(__AVX512F__)
inline constexpr float kCodeFactor = 256.0f;

// The 2 kLanes codes at p: those at even and at odd places, times 1 / kCodeFactor.
SPLICE_INLINE void LoadCodePairs(const uint8_t* p, F& even, F& odd) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i places = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));  // sign, and 4 + 3 bits behind a zero
  even = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1), places));
  odd = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(words, 1), places));
}
#elif defined(__AVX2__)
inline constexpr float kCodeFactor = 256.0f;

SPLICE_INLINE void LoadCodePairs(const uint8_t* p, F& even, F& odd) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i places = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
  even = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(words, 8), 1), places));
  odd = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), places));
}
#else
inline constexpr float kCodeFactor = 1.0f;

SPLICE_INLINE void LoadCodePairs(const uint8_t* p, F& even, F& odd) { LoadE4M3Pairs(p, even, odd); }
#endif

}  // namespace spl::kernels::cpu::SPLICE_ISA
