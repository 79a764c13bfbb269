// Turns chosen lines into the form that attention walks (LineVisibility). Slashes become whole 64 x 64 tiles; columns
// outside such tiles are computed one by one (MInference's kernel; docs/methods/loopserve.md, "cost"). More is computed
// than was chosen, never less: a tile is set if a slash has a cell in it for some row of the row tile.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/common/visibility.h"
#include "kernels/selection/loopserve/line_select.h"

namespace spl::kernels {

// Writes num_row_tiles x tile_words and num_row_tiles x column_words words. dense: every causal tile, no columns.
// REQUIRES columns and offsets ascending, 0 among the offsets unless dense, 64 · column_words >= columns.size().
struct LineTilesArgs {
  LineRows rows;
  std::span<const int32_t> columns, offsets;
  bool dense = false;
  int32_t tile_words = 0, column_words = 0;
  uint64_t* tiles = nullptr;
  uint64_t* column_masks = nullptr;
};
void LinesToTiles(const LineTilesArgs& args);

}  // namespace spl::kernels
