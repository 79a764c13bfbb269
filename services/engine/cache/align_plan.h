// From segment hits, or what is left of a prompt, to the arguments of align copies (kernels/kv_copy/align_copy.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_copy/align_copy.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// Copies into the layers from first_layer on.
struct AlignPlan {
  std::vector<kernels::AlignRun> runs;
  std::vector<int32_t> src_pages, dst_pages;  // [runs][num_streams]
  std::vector<float> cos, sin;                // [distances][head_dim / 2]
  int32_t num_streams = 0;

  // Valid while the plan is.
  kernels::AlignCopyArgs Args(const kernels::KvPoolView& pool, int32_t head_dim) const;
};

// One for each of the ranks that share the KV heads; the pages of a head are on its rank, source and target alike.
// REQUIRES: pages of `kv` for every target. Cosine and sine of each distance are computed in double from the model's
// scaled frequencies; the magnitude factor of YaRN is in the cached keys already.
std::vector<AlignPlan> MakeAlignPlans(std::span<const SegmentHit> hits, const SequenceKv& kv, int32_t first_layer,
                                      const ModelConfig& config, int num_ranks = 1);

// Moves positions `only` of `kv`, ascending and disjoint, together to positions 0, 1, …, in all layers, keys turned by
// the distance. [steps][num_ranks]: one step runs behind the other, because its targets are sources of earlier ones.
// A step moves at least as many positions as are missing in front of it: all in all a few, for fewer steps the more is
// left out.
std::vector<std::vector<AlignPlan>> MakeCompactPlans(std::span<const PositionRange> only, const SequenceKv& kv,
                                                     const ModelConfig& config, int num_ranks = 1);

}  // namespace spl::engine
