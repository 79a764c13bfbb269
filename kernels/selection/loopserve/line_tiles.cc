#include "kernels/selection/loopserve/line_tiles.h"

#include <algorithm>
#include <vector>

namespace spl::kernels {

void LinesToTiles(const LineTilesArgs& a) {
  const auto set = [](uint64_t* words, int64_t bit) { words[bit / 64] |= uint64_t{1} << (bit % 64); };
  const int32_t num_tiles = (a.rows.num_rows + 63) / 64;
  std::fill_n(a.tiles, int64_t{num_tiles} * a.tile_words, 0);
  std::fill_n(a.column_masks, int64_t{num_tiles} * a.column_words, 0);
  for (int32_t t = 0; t < num_tiles; ++t) {
    uint64_t* tiles = a.tiles + int64_t{t} * a.tile_words;
    const int32_t low = a.rows.first_position + 64 * t, high = std::min(low + 63, a.rows.num_keys() - 1);
    if (a.dense) {
      for (int32_t page = 0; page <= high / 64; ++page) set(tiles, page);
      continue;
    }
    // The keys of offset o are those at [low - o, high - o]: one page or two.
    for (const int32_t o : a.offsets) {
      if (o > high) break;
      for (int32_t page = std::max(low - o, 0) / 64; page <= (high - o) / 64; ++page) set(tiles, page);
    }
    for (size_t i = 0; i < a.columns.size() && a.columns[i] < low; ++i) {
      const int32_t page = a.columns[i] / 64;
      if ((tiles[page / 64] >> (page % 64) & 1) == 0)
        set(a.column_masks + int64_t{t} * a.column_words, static_cast<int64_t>(i));
    }
  }
}

}  // namespace spl::kernels
