// What of a segment is known without its KV: by it samkv chooses the tiles that a question needs (SamKV 3.1, 3.2) and
// the tokens that are computed afresh (3.3; docs/methods/samkv.md).
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

// Vectors are of the positions where they were computed: TurnSummary brings them elsewhere. Immutable once shared. A
// part that is empty is not known.
struct SegmentSummary {
  // [num_layers, num_tiles, num_kv_heads, head_dim]: mean key of each 64 tokens, the last tile perhaps of fewer. 1/64
  // of the keys, as f32.
  std::vector<float> tile_means;
  // [num_layers, num_qo_heads, head_dim]: mean query of the last two tiles' tokens.
  std::vector<float> local_query;
  // Known when the local query is, of the same rows: the segment's attended tokens, see MostAttended, as offsets in the
  // segment, ascending. A segment without middle tiles has none.
  std::vector<int32_t> attended;
};

// Tiles whose queries make the local query.
inline constexpr int32_t kLocalTiles = 2;
// Where they lie of a segment at these positions, cut in tiles from its first token on.
PositionRange LocalTilesOf(const PositionRange& segment);
// What lies between the first tile and these; empty, begin == end, where nothing does.
PositionRange MiddleTilesOf(const PositionRange& segment);

// The tokens with "significant attention weights in the original context" (SamKV 3.3): of the middle tiles' tokens
// those that get most attention from the local tiles' rows, summed over these rows, all layers and all heads
// (kernels/selection/sparsex/column_scores.h). One list for all layers: a token that is computed afresh in one layer
// needs the outputs of all layers below, and what is computed is the union (rule 1). Initial and local tokens are
// computed afresh anyway, and would fill the list: the first token gets most everywhere. Each of these rows sees each
// middle token, so that no token has less for standing later. A quarter of them, ours, as the paper's number is in an
// appendix that the text lacks; and no fewer than eight where there are eight.
int32_t NumAttended(int32_t num_middle_tokens);
// So many of the middle tokens, by their scores: numbers of them, ascending; of equal scores the lower is taken. NaN
// counts as the lowest.
std::vector<int32_t> MostAttended(std::span<const float> scores);

// The tile means of `hit`'s part of its source, tiles counted from its first token; no local query. Reads the part's
// pages once, layer by layer, through host memory. Errors are those of reading device memory.
absl::StatusOr<SegmentSummary> SummarizeKeys(const SegmentHit& hit, const ModelConfig& config, kernels::DType kv_dtype);

// The same at positions that lie `distance` further on: keys and queries turn alike (kernels/kv_copy/align_copy.h).
SegmentSummary TurnSummary(const SegmentSummary& summary, int32_t distance, const ModelConfig& config);

}  // namespace spl::engine
