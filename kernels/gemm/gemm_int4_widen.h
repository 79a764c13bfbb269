// int4 codes as bf16 in AVX-512: for gemm_int4_avx512.cc and gemm_int4_amx.cc, which are compiled with it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/gemm/gemm_ask_ahead.h"
#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_int4_isa.h"

namespace spl::kernels::cpu {
namespace {

// -16 to 15 in bf16.
alignas(64) constexpr uint16_t kValues[32] = {0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                                              0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                              0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                              0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Widens depth pairs of one scale group.
class Int4Widener {
 public:
  // offsets: [32]; each stands twice, as its column's two depths do.
  explicit Int4Widener(const uint8_t* offsets) : values_(_mm512_load_si512(kValues)) {
    const auto twice = [](const uint8_t* of_columns) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_columns));
      return _mm256_set_m128i(_mm_unpackhi_epi8(v, v), _mm_unpacklo_epi8(v, v));
    };
    first_ = twice(offsets);
    second_ = twice(offsets + 16);
  }

  // The 32 bytes of a depth pair as the words of the two tiles.
  void Pair(const uint8_t* codes, __m512i& w0, __m512i& w1) const {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i mask = _mm256_set1_epi8(15);
    w0 = Values(_mm256_add_epi8(_mm256_and_si256(bytes, mask), first_));
    w1 = Values(_mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), second_));
  }

  // A depth block as the two tiles of a bf16 panel. out: 64-byte aligned.
  void Block(const uint8_t* codes, bf16* out) const {
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair) {
      __m512i w0, w1;
      if (pair % 2 == 0) AskAhead(codes + pair * 32);  // two pairs are a line
      Pair(codes + pair * 32, w0, w1);
      _mm512_store_si512(out + pair * 32, w0);
      _mm512_store_si512(out + kBf16TileElements + pair * 32, w1);
    }
  }

 private:
  static constexpr int kPairs = kBf16DepthBlock / 2;

  __m512i Values(__m256i at) const { return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(at), values_); }

  __m512i values_;
  __m256i first_, second_;
};

inline void WidenInt4(const uint8_t* panel, const uint8_t* offsets, int64_t depth_blocks, bf16* out) {
  const Int4Widener widener(offsets);
  for (int64_t block = 0; block < depth_blocks; ++block)
    widener.Block(panel + block * kInt4BlockBytes, out + block * kBf16PairElements);
}

}  // namespace
}  // namespace spl::kernels::cpu
