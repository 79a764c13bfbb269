// Rounding of rows and storing of sums in AVX-512, shared by both bf16 tables: for gemm_bf16_avx512.cc and
// gemm_bf16_amx.cc, which are compiled with AVX-512 and its BF16 extension.
#pragma once

#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {
namespace {

// Rounds to nearest even; denormals become 0, NaN stays NaN.
inline __m512i RoundToBf16(const float* x, int64_t n) {
  const auto mask = [](int64_t lanes) {
    return static_cast<__mmask16>(lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : (1u << lanes) - 1);
  };
  const __m512 low = _mm512_maskz_loadu_ps(mask(n), x);
  const __m512 high = n > 16 ? _mm512_maskz_loadu_ps(mask(n - 16), x + 16) : _mm512_setzero_ps();
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

void PackBf16Rows(const float* x, int64_t num_rows, int64_t depth, bf16* out) {
  for (int64_t k = 0; k < depth; k += kBf16DepthBlock) {
    bf16* tile = out + k / kBf16DepthBlock * kBf16PairElements;
    for (int64_t r = 0; r < num_rows; ++r) {
      _mm512_storeu_si512(tile + r * kBf16DepthBlock, RoundToBf16(x + r * depth + k, depth - k));
    }
    for (int64_t r = num_rows; r < kBf16RowBlock; ++r) {
      _mm512_storeu_si512(tile + r * kBf16DepthBlock, _mm512_setzero_si512());
    }
  }
}

void StoreBf16Sums(const float* sums, int64_t num_rows, int64_t num_columns, const float* bias, float* y,
                   int64_t y_stride) {
  for (int64_t c = 0; c < num_columns; c += 16) {
    const int64_t n = num_columns - c;
    const auto mask = static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
    const __m512 add = bias != nullptr ? _mm512_maskz_loadu_ps(mask, bias + c) : _mm512_setzero_ps();
    for (int64_t r = 0; r < num_rows; ++r) {
      const __m512 sum = _mm512_load_ps(sums + r * kBf16PanelColumns + c);
      _mm512_mask_storeu_ps(y + r * y_stride + c, mask, bias != nullptr ? _mm512_add_ps(sum, add) : sum);
    }
  }
}

}  // namespace
}  // namespace spl::kernels::cpu
