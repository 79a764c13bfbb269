// Summary of a segment, which can be used without its KV. By it samkv chooses the tiles that a question needs (SamKV
// 3.1, 3.2) and the tokens that are recomputed (3.3; docs/methods/samkv.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// Vectors are rotated by the positions at which they were computed; TurnSummary moves them. Immutable once shared. An
// empty part is not known.
struct SegmentSummary {
  // [num_layers, num_tiles, num_kv_heads, head_dim]: mean key of each tile of 64 tokens; the last tile may have fewer.
  // As f32; 1/64 as many numbers as keys.
  std::vector<float> tile_means;
  // [num_layers, num_qo_heads, head_dim]: mean query over the tokens of the last two tiles.
  std::vector<float> local_query;
  // The segment's attended tokens (MostAttended), as ascending offsets in the segment. Known if the local query is, and
  // of the same rows. A segment without middle tiles has none.
  std::vector<int32_t> attended;
};

// Number of last tiles whose queries make the local query.
inline constexpr int32_t kLocalTiles = 2;
// Positions of these tiles, for a segment at these positions that is cut in tiles from its first token on.
PositionRange LocalTilesOf(const PositionRange& segment);
// Positions between the first tile and these. Empty (begin == end): there are none.
PositionRange MiddleTilesOf(const PositionRange& segment);

// Number of attended tokens: those with "significant attention weights in the original context" (SamKV 3.3). They are
// the tokens of the middle tiles that get most attention from the rows of the local tiles, summed over these rows, all
// layers and all heads (kernels/selection/sparsex/column_scores.h).
//
// There is one list for all layers: a token that is recomputed in one layer needs the outputs of all layers below, so
// that the union is recomputed anyway (rule 1). Initial and local tokens are recomputed anyway, and would fill the
// list: the first token gets most attention everywhere. Each of these rows sees each middle token, so that no token
// gets less because of its position.
//
// The number is a quarter of the middle tokens, but at least eight if there are eight. It is ours: the paper's number
// is in an appendix that the text lacks.
int32_t NumAttended(int32_t num_middle_tokens);
// The NumAttended middle tokens with the highest scores, as ascending indices; ties to the lower index. NaN counts as
// the lowest score.
std::vector<int32_t> MostAttended(std::span<const float> scores);

// Computes the tile means of the part of its source that `hit` has, with tiles from the part's first token on; leaves
// the local query empty. Reads the part's pages once, layer by layer, through host memory. Errors are those of reading
// device memory.
absl::StatusOr<SegmentSummary> SummarizeKeys(const SegmentHit& hit, const ModelConfig& config, kernels::DType kv_dtype);

// The same summary at positions that are `distance` higher: keys and queries are rotated alike
// (kernels/kv_copy/align_copy.h).
SegmentSummary TurnSummary(const SegmentSummary& summary, int32_t distance, const ModelConfig& config);

}  // namespace spl::engine
