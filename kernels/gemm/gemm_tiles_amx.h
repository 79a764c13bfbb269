// AMX tiles of a product with one panel: for the files that are compiled with AMX-TILE and AMX-BF16. A thread that uses
// them must have the operating system's permission for tile data (common/cpu_features.cc asks).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu::amx {
namespace {

// The memory format of LDTILECFG, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// For products of num_rows rows, until ReleaseTiles. Tiles 0 to 3 are sums (row tile r, column tile c: 2r + c), 4 and 5
// rows of x, 6 and 7 columns of the weight.
inline void ConfigureTiles(int64_t num_rows) {
  TileConfig config;
  const auto first = static_cast<uint8_t>(num_rows < kBf16TileRows ? num_rows : kBf16TileRows);
  const auto second = static_cast<uint8_t>(num_rows > kBf16TileRows ? num_rows - kBf16TileRows : kBf16TileRows);
  for (int t = 0; t < 8; ++t) {
    config.bytes_per_row[t] = 64;
    config.rows[t] = static_cast<uint8_t>(kBf16TileRows);
  }
  config.rows[0] = config.rows[1] = config.rows[4] = first;
  config.rows[2] = config.rows[3] = config.rows[5] = second;
  asm volatile("" ::"m"(config));  // GCC's intrinsic says that it reads 8 bytes, and the other stores go
  _tile_loadconfig(&config);
}

// Tiles in use cost every switch of threads 8 KiB.
inline void ReleaseTiles() { _tile_release(); }

constexpr int kLine = 64;  // bytes of a tile's row
constexpr int kSumsLine = kBf16PanelColumns * sizeof(float);

// Sums of one panel, in the layout of gemm_bf16_isa.h.
inline void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
template <bool kTwoRowTiles>
void LoadSums(const float* sums) {
  _tile_loadd(0, sums, kSumsLine);
  _tile_loadd(1, sums + 16, kSumsLine);
  if (!kTwoRowTiles) return;
  const float* const low = sums + kBf16TileRows * kBf16PanelColumns;  // rows 16 and up
  _tile_loadd(2, low, kSumsLine);
  _tile_loadd(3, low + 16, kSumsLine);
}
template <bool kTwoRowTiles>
void StoreSums(float* sums) {
  _tile_stored(0, sums, kSumsLine);
  _tile_stored(1, sums + 16, kSumsLine);
  if (!kTwoRowTiles) return;
  float* const low = sums + kBf16TileRows * kBf16PanelColumns;
  _tile_stored(2, low, kSumsLine);
  _tile_stored(3, low + 16, kSumsLine);
}

// A panel of codes, over `depth_blocks` depth blocks of one scale group: sums are overwritten. Each block is widened to
// the first-level cache, where tiles load it, while the tensor unit multiplies the one before: widened beforehand, it
// would be read from the second level. Bitwise the product of gemm_bf16_amx.cc with widened codes. REQUIRES: tiles are
// configured for num_rows. widen(block, out): that depth block as the two tiles of a bf16 panel.
template <bool kTwoRowTiles, typename Widen>
void MultiplyCodes(const bf16* x, int64_t depth_blocks, const Widen& widen, float* sums) {
  constexpr int kBlocks = 4;  // in a ring: stores do not wait for the loads in front
  alignas(64) bf16 ring[kBlocks][kBf16PairElements];
  ZeroSums();
  for (int64_t block = 0; block < depth_blocks; ++block) {
    bf16* const w = ring[block % kBlocks];
    widen(block, w);
    _tile_loadd(6, w, kLine);
    _tile_loadd(4, x, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kBf16TileElements, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwoRowTiles) {
      _tile_loadd(5, x + kBf16TileElements, kLine);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    x += kBf16PairElements;
  }
  StoreSums<kTwoRowTiles>(sums);
}
template <typename Widen>
void MultiplyCodes(const bf16* x, int64_t num_rows, int64_t depth_blocks, const Widen& widen, float* sums) {
  num_rows > kBf16TileRows ? MultiplyCodes<true>(x, depth_blocks, widen, sums)
                           : MultiplyCodes<false>(x, depth_blocks, widen, sums);
}

}  // namespace
}  // namespace spl::kernels::cpu::amx
