// The bf16 product by TDPBF16PS. Compiled with AMX-TILE, AMX-BF16 and AVX-512; leaf code on raw pointers only (see
// common/simd.h). A thread that calls it must have the operating system's permission for tile data
// (common/cpu_features.cc asks).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_isa.h"
#include "kernels/gemm/gemm_bf16_rows.h"

namespace spl::kernels::cpu::amx {
namespace {

// The memory format of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0 to 3 are sums (row tile r, column tile c: 2r + c), 4 and 5 rows of x, 6 and 7 columns of the weight.
void Configure(int64_t num_rows) {
  TileConfig config;
  const auto first = static_cast<uint8_t>(num_rows < kBf16TileRows ? num_rows : kBf16TileRows);
  const auto second = static_cast<uint8_t>(num_rows > kBf16TileRows ? num_rows - kBf16TileRows : kBf16TileRows);
  for (int t = 0; t < 8; ++t) {
    config.bytes_per_row[t] = 64;
    config.rows[t] = static_cast<uint8_t>(kBf16TileRows);
  }
  config.rows[0] = config.rows[1] = config.rows[4] = first;
  config.rows[2] = config.rows[3] = config.rows[5] = second;
  _tile_loadconfig(&config);
}

constexpr int kLine = 64;  // bytes of a tile's row
constexpr int kSumsLine = kBf16PanelColumns * sizeof(float);

// One panel. Two tiles of rows: four products for four loads, which two load ports serve in half of their time; every
// step also asks for a part of the rows that come next. One tile of rows: few rows, and reading the weight is the cost;
// asking for 2 KiB at once, a tile ahead, reads 34 GB/s where tile loads alone read 29 (one row, two cores).
template <bool kTwoRowTiles>
void MultiplyPanel(const Bf16Block& b, int64_t panel) {
  const bf16* w = b.w + panel * b.w_stride;
  float* sums = b.sums + panel * kBf16SumsOfPanel;
  float* low = sums + kBf16TileRows * kBf16PanelColumns;  // rows 16 and up
  if (b.add) {
    _tile_loadd(0, sums, kSumsLine);
    _tile_loadd(1, sums + 16, kSumsLine);
    if (kTwoRowTiles) {
      _tile_loadd(2, low, kSumsLine);
      _tile_loadd(3, low + 16, kSumsLine);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const bf16* x = b.x;
  const auto* next = reinterpret_cast<const char*>(b.next_x);
  const int64_t lines = 2 * kBf16TileRows, begin = panel * lines / b.num_panels,
                end = next == nullptr ? begin : (panel + 1) * lines / b.num_panels;
  for (int64_t block = 0; block < b.depth_blocks; ++block) {
    if (!kTwoRowTiles) {
#pragma GCC unroll 32
      for (int line = 0; line < 32; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(w + kBf16TileElements) + line * kLine, _MM_HINT_T0);
      }
    }
    _tile_stream_loadd(6, w, kLine);
    _tile_loadd(4, x, kLine);
    _tile_dpbf16ps(0, 4, 6);
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
  _tile_stored(0, sums, kSumsLine);
  _tile_stored(1, sums + 16, kSumsLine);
  if (kTwoRowTiles) {
    _tile_stored(2, low, kSumsLine);
    _tile_stored(3, low + 16, kSumsLine);
  }
}

void Multiply(const Bf16Block& b) {
  Configure(b.num_rows);
  for (int64_t p = 0; p < b.num_panels; ++p) {
    if (b.num_rows > kBf16TileRows) {
      MultiplyPanel<true>(b, p);
    } else {
      MultiplyPanel<false>(b, p);
    }
  }
  _tile_release();  // tiles in use cost every switch of threads 8 KiB
}

}  // namespace

extern const Bf16GemmKernels kBf16Gemm;
const Bf16GemmKernels kBf16Gemm = {PackBf16Rows, Multiply, StoreBf16Sums};

}  // namespace spl::kernels::cpu::amx
