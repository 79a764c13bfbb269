// The bf16 product by VDPBF16PS. Compiled with AVX-512 and its BF16 extension;
// leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_bf16_rows.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

constexpr int kPairs = static_cast<int>(kBf16DepthBlock / 2);
constexpr int kTileWords = static_cast<int>(kBf16TileElements / 2);  // a word: two bf16

// kRows rows from `row` on of kPanels neighbouring panels. 12 rows of two registers are 24 sums, two operands and a
// broadcast: 27 of the 32 registers, and more chains than the latency of two units needs. Few rows take two panels, for
// as many chains as they can have.
//
// kFromMemory: few rows, and reading the weight is the cost. Asking for the next block's 2 KiB of each panel at once
// reads 1.6 to 2.0 times as much a second as the loads alone do (one row, two cores of an EPYC: 31 GB/s instead of 15
// from memory, 33 instead of 17 from the third-level cache).
template <int kRows, int kPanels, bool kFromMemory>
void MultiplyRows(const Bf16Block& b, int64_t row, const int32_t* w, float* sums) {
  const auto* x = reinterpret_cast<const int32_t*>(b.x);
  const int64_t w_stride = b.w_stride / 2;
  const int32_t* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x + (row + r) * kPairs;
  }
  const auto sums_of = [&](int p, int r) { return sums + p * kBf16SumsOfPanel + (row + r) * kBf16PanelColumns; };
  __m512 c[kPanels][kRows][2];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      c[p][r][0] = b.add ? _mm512_load_ps(sums_of(p, r)) : _mm512_setzero_ps();
      c[p][r][1] = b.add ? _mm512_load_ps(sums_of(p, r) + 16) : _mm512_setzero_ps();
    }
  }
  for (int64_t block = 0; block < b.depth_blocks; ++block) {
    const int32_t* tile = w + block * 2 * kTileWords;
    if (kFromMemory) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const auto* next = reinterpret_cast<const char*>(tile + p * w_stride + 2 * kTileWords);
#pragma GCC unroll 32
        for (int line = 0; line < 32; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T0);
      }
    }
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const int32_t* columns = tile + p * w_stride + pair * 16;
        const auto w0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(columns));
        const auto w1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(columns + kTileWords));
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const auto xr = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows[r][block * 2 * kTileWords + pair]));
          c[p][r][0] = _mm512_dpbf16_ps(c[p][r][0], xr, w0);
          c[p][r][1] = _mm512_dpbf16_ps(c[p][r][1], xr, w1);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      _mm512_store_ps(sums_of(p, r), c[p][r][0]);
      _mm512_store_ps(sums_of(p, r) + 16, c[p][r][1]);
    }
  }
}

// All rows of kPanels panels; the first rows bring the panels in, the others find them in the cache.
template <int kPanels, bool kFromMemory>
void MultiplyPanels(const Bf16Block& b, const int32_t* w, float* sums) {
  constexpr int kMost = kPanels == 1 ? 12 : 4;
  const auto multiply = [&]<int kRows>(int64_t row) {
    if (kFromMemory && row == 0) return MultiplyRows<kRows, kPanels, true>(b, row, w, sums);
    MultiplyRows<kRows, kPanels, false>(b, row, w, sums);
  };
  int64_t row = 0;
  for (; row + kMost <= b.num_rows; row += kMost) multiply.template operator()<kMost>(row);
  for (; row + 4 <= b.num_rows; row += 4) multiply.template operator()<4>(row);
  switch (b.num_rows - row) {
    case 3:
      return multiply.template operator()<3>(row);
    case 2:
      return multiply.template operator()<2>(row);
    case 1:
      return multiply.template operator()<1>(row);
    default:
      return;
  }
}

// Up to so many rows take two panels at a time.
constexpr int64_t kFewRows = 11;

void Multiply(const Bf16Block& b) {
  // Blocks of more than one tile of rows are mostly parts of many rows, which find the panels in the second-level
  // cache.
  const bool from_memory = b.num_rows <= kBf16TileRows;
  const auto* w = reinterpret_cast<const int32_t*>(b.w);
  const auto panel = [&](int64_t p) { return w + p * (b.w_stride / 2); };
  const auto sums = [&](int64_t p) { return b.sums + p * kBf16SumsOfPanel; };
  int64_t p = 0;
  if (b.num_rows <= kFewRows) {
    for (; p + 2 <= b.num_panels; p += 2) MultiplyPanels<2, true>(b, panel(p), sums(p));
  }
  for (; p < b.num_panels; ++p) {
    from_memory ? MultiplyPanels<1, true>(b, panel(p), sums(p)) : MultiplyPanels<1, false>(b, panel(p), sums(p));
  }
}

}  // namespace

extern const Bf16GemmKernels kBf16Gemm;
const Bf16GemmKernels kBf16Gemm = {PackBf16Rows, Multiply, StoreBf16Sums};

}  // namespace spl::kernels::cpu::avx512_bf16
