// The bf16 product by TDPBF16PS. Compiled with AMX-TILE, AMX-BF16 and AVX-512; leaf code on raw pointers only (see
// common/simd.h). A thread that calls it must have the operating system's permission for tile data
// (common/cpu_features.cc asks).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_bf16_rows.h"
#include "kernels/gemm/gemm_tiles_amx.h"

namespace spl::kernels::cpu::amx {
namespace {

// How far ahead of the products the weight is asked for. Of 1, 2, 4 and 8 blocks this one reads fastest.
constexpr int64_t kBlocksAhead = 4;

// Asks for lines [kBegin, kEnd) of a block of a panel, which is 32 lines.
template <int kBegin, int kEnd>
void Prefetch(const char* block) {
#pragma GCC unroll 32
  for (int line = kBegin; line < kEnd; ++line) _mm_prefetch(block + line * kLine, _MM_HINT_T0);
}

// One panel. Two tiles of rows: four products for four loads, which two load ports serve in half of their time; a
// weight that a cache holds leaves them room to ask for a part of the rows that come next. kFromMemory: reading the
// weight is the cost. Tile loads alone read 11 GB/s with two tiles of rows and 17 with one, asking ahead 19 and 22,
// where plain loads read 24 (two cores of Emerald Rapids).
template <bool kTwoRowTiles, bool kFromMemory>
void MultiplyPanel(const Bf16Block& b, int64_t panel) {
  const bf16* w = b.w + panel * b.w_stride;
  float* sums = b.sums + panel * kBf16SumsOfPanel;
  if (b.add) {
    LoadSums<kTwoRowTiles>(sums);
  } else {
    ZeroSums();
  }
  const bf16* x = b.x;
  const auto* next = reinterpret_cast<const char*>(b.next_x);
  const int64_t lines = 2 * kBf16TileRows, begin = panel * lines / b.num_panels,
                end = next == nullptr ? begin : (panel + 1) * lines / b.num_panels;
  for (int64_t block = 0; block < b.depth_blocks; ++block) {
    const int64_t later = block + kBlocksAhead - b.depth_blocks;  // of the next panel, from 0 on
    const auto* ahead = reinterpret_cast<const char*>(
        later < 0 ? w + kBlocksAhead * kBf16PairElements : b.w + (panel + 1) * b.w_stride + later * kBf16PairElements);
    if (kFromMemory) Prefetch<0, 16>(ahead);
    _tile_stream_loadd(6, w, kLine);
    _tile_loadd(4, x, kLine);
    _tile_dpbf16ps(0, 4, 6);
    if (kFromMemory) Prefetch<16, 32>(ahead);
    _tile_stream_loadd(7, w + kBf16TileElements, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoRowTiles) {
      _tile_loadd(5, x + kBf16TileElements, kLine);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      for (int64_t line = begin; line < end; ++line) _mm_prefetch(next + line * kLine, _MM_HINT_T1);
      next += lines * kLine;
    }
    w += kBf16PairElements;
    x += kBf16PairElements;
  }
  StoreSums<kTwoRowTiles>(sums);
}

void Multiply(const Bf16Block& b) {
  ConfigureTiles(b.num_rows);
  for (int64_t p = 0; p < b.num_panels; ++p) {
    if (b.num_rows <= kBf16TileRows) {
      b.from_memory ? MultiplyPanel<false, true>(b, p) : MultiplyPanel<false, false>(b, p);
    } else {
      b.from_memory ? MultiplyPanel<true, true>(b, p) : MultiplyPanel<true, false>(b, p);
    }
  }
  ReleaseTiles();
}

}  // namespace

extern const Bf16GemmKernels kBf16Gemm;
const Bf16GemmKernels kBf16Gemm = {PackBf16Rows, Multiply, StoreBf16Sums};

}  // namespace spl::kernels::cpu::amx
