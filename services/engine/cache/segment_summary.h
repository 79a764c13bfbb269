// What of a segment is known without its KV: by it samkv chooses the tiles that a question needs (SamKV 3.1, 3.2;
// algorithms.md section 3).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model_config.h"
#include "services/engine/recovery/ranges.h"

namespace spl::engine {

// Vectors are of the positions where they were computed: TurnSummary brings them elsewhere. Immutable once shared. A
// part that is empty is not known.
struct SegmentSummary {
  // [num_layers, num_tiles, num_kv_heads, head_dim]: mean key of each 64 tokens, the last tile perhaps of fewer. 1/64
  // of the keys, as f32.
  std::vector<float> tile_means;
  // [num_layers, num_qo_heads, head_dim]: mean query of the last two tiles' tokens.
  std::vector<float> local_query;

  bool is_complete() const { return !tile_means.empty() && !local_query.empty(); }
};

// Tiles whose queries make the local query.
inline constexpr int32_t kLocalTiles = 2;
// Where they lie of a segment at these positions, cut in tiles from its first token on.
PositionRange LocalTilesOf(const PositionRange& segment);

// The tile means of `hit`'s part of its source, tiles counted from its first token; no local query. Reads the part's
// pages once, layer by layer, through host memory. Errors are those of reading device memory.
absl::StatusOr<SegmentSummary> SummarizeKeys(const SegmentHit& hit, const ModelConfig& config, kernels::DType kv_dtype);

// The same at positions that lie `distance` further on: keys and queries turn alike (kernels/kv_copy/align_copy.h).
SegmentSummary TurnSummary(const SegmentSummary& summary, int32_t distance, const ModelConfig& config);

}  // namespace spl::engine
