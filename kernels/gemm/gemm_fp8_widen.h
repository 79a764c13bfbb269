// FP8 codes as bf16 in AVX-512: for gemm_fp8_avx512.cc and gemm_fp8_amx.cc, which are compiled with it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/gemm/gemm_ask_ahead.h"

namespace spl::kernels::cpu {
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

// count: a multiple of 64; out: 64-byte aligned.
inline void WidenFp8(const uint8_t* codes, int64_t count, bf16* out) {
  for (int64_t i = 0; i < count; i += 64) {
    AskAhead(codes + i);
    _mm512_store_si512(out + i, Widen32(codes + i));
    _mm512_store_si512(out + i + 32, Widen32(codes + i + 32));
  }
}

}  // namespace
}  // namespace spl::kernels::cpu
