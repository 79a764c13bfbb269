// The positions that a row of one KV head may attend to. Every prefill and decode method is data in these structs;
// kernels never see a dense mask. (RedKnot 3.2, LoopServe 3.2, SamKV 3.1, SparCas 3: docs/methods/kernels.md, "two
// attention contracts".)
#pragma once

#include <cstdint>
#include <span>

namespace spl::kernels {

enum class VisibilityRule : uint8_t {
  kFull,   // positions [0, pos]
  kBand,   // positions [0, num_sinks) ∪ [pos - window + 1, pos]
  kList,   // positions listed in `indices`, and <= pos
  kLines,  // per 64-row tile its own key tiles and columns (LineVisibility); prefill only
  // Decode only: positions in the stream's entry of the call's lists (TokenLists), and <= pos. Use kSelected for lists
  // that only the device knows, kList for lists that the caller has.
  kSelected,
  // Decode only: another operation attends for the stream (SparseAttention). Its output and lse stay unchanged.
  kElsewhere,
};

// Slash and vertical lines in the form that attention walks (LoopServe 3.2, MInference: docs/methods/loopserve.md and
// docs/methods/baselines.md). Row tile t is the rows at positions [first_position + 64 t, first_position + 64 t +
// 63] of one sequence, cut at num_rows rows. A row at p sees j <= p if bit j / 64 of its tile's `tiles` is set, or if j
// = columns[i] and bit i of its tile's `column_masks` is set. REQUIRES: a column whose bit is set is in no set tile and
// before the tile's first row. It is then the same for all rows of the tile, and counted once. Pointers are memory of
// the device that runs the attention, borrowed until it has run. Words past the last page or column are 0.
struct LineVisibility {
  int32_t first_position = 0;
  int32_t num_rows = 0;
  int32_t tile_words = 0;                  // 64-bit words of a row tile in `tiles`
  int32_t column_words = 0;                // the same in `column_masks`
  const uint64_t* tiles = nullptr;         // [ceil(num_rows / 64), tile_words]: bit i is the page of positions 64 i ...
  const uint64_t* column_masks = nullptr;  // [ceil(num_rows / 64), column_words]
  const int32_t* columns = nullptr;        // [64 column_words] are readable; ascending where a mask has a bit
  // CUDA only: K and V of the columns, gathered into pages like those of the pool: [column_words][2][64, head_dim],
  // page c with columns [64 c, 64 c + 63]. Slots that no mask names must be finite. The host gathers by itself.
  const void* column_pages = nullptr;

  int32_t num_row_tiles() const { return (num_rows + 63) / 64; }
};

// Causality is by original position in every rule: a row at position p never sees a position above p.
struct HeadVisibility {
  VisibilityRule rule = VisibilityRule::kFull;
  int32_t num_sinks = 0;                  // kBand; >= 0
  int32_t window = 0;                     // kBand; >= 1, counts the row itself
  std::span<const int32_t> indices = {};  // kList: sorted ascending, no duplicates; borrowed for the call
  const LineVisibility* lines = nullptr;  // kLines; borrowed for the call
};

}  // namespace spl::kernels
