// Layout of packed keys: 32 dimensions of the keys of one head stream in 4 bits each, in pages of the pool that also
// holds the keys themselves (docs/methods/sparcas.md, "Packed keys").
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels {

inline constexpr int32_t kPackedDims = 32;
// Tiles of a stream by whose positions the others are judged: 32 of them, evenly spread, or all that there are.
struct PackedSample {
  static constexpr int32_t kMost = 32;
  int32_t num_tiles;  // all that the stream has

  constexpr int32_t num() const { return num_tiles < kMost ? num_tiles : kMost; }
  constexpr int32_t tile(int32_t i) const { return num_tiles < kMost ? i : i * num_tiles / kMost; }
  // Positions of the stream for each one in the sample. The last tile, which may be short, is in it if all are.
  constexpr float scale(int32_t choosable) const {
    return num_tiles <= kMost ? 1.0f : static_cast<float>(choosable) / (kMost * kPageTokens);
  }
};
// Bytes of a tile of 64 positions: 4 bits for each position and dimension, one bf16 scale for each dimension, and the
// largest of these scales.
inline constexpr int32_t kPackedScalesAt = kPackedDims * kPageTokens / 2;
inline constexpr int32_t kPackedLargestAt = kPackedScalesAt + 2 * kPackedDims;
inline constexpr int32_t kPackedTileBytes = kPackedLargestAt + 16;
// Last positions of a sequence that are always attended to, at least: tiles are packed when they are full.
inline constexpr int32_t kPackedRecentMin = kPageTokens;

// A page holds as many tiles as fit. The scale of a dimension is s = bf16(max |k| / 7) over its 64 keys, and a key is
// n = round(k / s) to even in [-7, 7], kept as n + 8; all n are 0 if s is 0. The order of the 4-bit values in a tile is
// the backend's own: packed keys never leave the device that made them.
struct PackedKeys {
  int64_t page_bytes = 0;

  constexpr int32_t tiles_per_page() const { return static_cast<int32_t>(page_bytes / kPackedTileBytes); }
  constexpr int32_t page_tokens() const { return tiles_per_page() * kPageTokens; }
  // Tiles that hold something to choose from.
  static int32_t NumTiles(int64_t kv_len, int32_t recent) {
    return static_cast<int32_t>((std::max<int64_t>(kv_len - recent, 0) + kPageTokens - 1) / kPageTokens);
  }
  int64_t num_pages(int64_t kv_len, int32_t recent) const {
    return (NumTiles(kv_len, recent) + tiles_per_page() - 1) / tiles_per_page();
  }
  // First byte of a tile in its page.
  int64_t TileAt(int32_t tile) const { return int64_t{tile % tiles_per_page()} * kPackedTileBytes; }

  // 2^k with which a query is rounded to integers in a tile: at most 2^14 of them for q_largest, the largest |q| of the
  // head's dimensions, and s_largest, that of the tile's scales.
  static float QueryFactor(float q_largest, float s_largest) {
    const auto exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(q_largest * s_largest) >> 23 & 255);
    return std::bit_cast<float>(static_cast<uint32_t>(std::clamp(267 - exponent, 1, 253)) << 23);
  }
  static bf16 ScaleOf(float largest) { return ToBf16(largest / 7.0f); }
  static int32_t Level(float key, float scale) {
    if (scale == 0) return 0;
    return static_cast<int32_t>(std::nearbyint(std::fmin(std::fmax(key / scale, -7.0f), 7.0f)));
  }
};

}  // namespace spl::kernels
