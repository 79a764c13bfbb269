// Converts head classes that others have published for a model into a HeadClassMap.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/engine/model/head_classes.h"

namespace spl::engine {

// Reads DuoAttention's full_attention_heads.tsv: a learned gate per layer (row) and KV head (column), separated by
// tabs. Heads whose gate is at or above the quantile 1 - preset.global_share become global; ties go to the lower layer
// and head (DuoAttention breaks them by chance). Sinks, window and dense prefix are the preset's. InvalidArgument names
// line and column.
absl::StatusOr<HeadClassMap> ImportDuoAttention(const std::string& tsv, const std::string& source,
                                                const HeadPreset& preset);

// Reads RedKnot's JSON. InvalidArgument names the field. Fields:
//   num_layers, num_kv_heads
//   kv_head_classification: "global", "retrieval" and "dense" see everything, as in its shipped runs; "local" and
//     "local_full" have a window
//   kv_head_max_distance: the window; below 1: global
//   kv_head_sink_size: optional, 4 by default
//   dense_prefix_layers: optional, 0 by default
absl::StatusOr<HeadClassMap> ImportRedKnot(const std::string& json, const std::string& source);

}  // namespace spl::engine
