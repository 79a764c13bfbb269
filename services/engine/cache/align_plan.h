// Makes the arguments of align copies (kernels/kv_copy/align_copy.h): for segment hits, and for moving the kept tokens
// of a prompt together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_copy/align_copy.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/shard.h"

namespace spl::engine {

// Copies of one rank, into some layers.
struct AlignPlan {
  std::vector<kernels::AlignRun> runs;
  std::vector<int32_t> src_pages, dst_pages;  // [runs][num_streams]
  std::vector<float> cos, sin;                // [distances][head_dim / 2]
  int32_t num_streams = 0;

  // Valid while the plan is.
  kernels::AlignCopyArgs Args(const kernels::KvPoolView& pool, int32_t head_dim) const;
};

// One plan per rank: the pages of a KV head are on its rank, source and target alike. REQUIRES: `kv` has pages for
// every target. Cosine and sine of each distance are computed in double from the model's scaled frequencies; cached
// keys already contain YaRN's magnitude factor.
std::vector<AlignPlan> MakeAlignPlans(std::span<const SegmentHit> hits, const SequenceKv& kv, const Range& layers,
                                      const ModelConfig& config, int num_ranks = 1);

// Divides layers into stretches whose plans have at most about `most_entries` pages in a table: a device copies the
// first stretch while the host writes the tables of the next one, of which a prompt of 32,768 tokens has half a million
// entries. Ascending; a stretch has at least one layer.
std::vector<Range> AlignStretches(std::span<const SegmentHit> hits, const Range& layers, int32_t num_kv_heads,
                                  int64_t most_entries = 65'536);

// Plans [steps][num_ranks] that move positions `only` of `kv` (ascending, disjoint) together to positions 0, 1, … in
// all layers, and rotate their keys by the distance. The steps run one after the other, because a step's targets are
// sources of earlier steps. A step moves at least as many positions as are missing in front of it, so that there are
// few steps: the more is left out, the fewer.
std::vector<std::vector<AlignPlan>> MakeCompactPlans(std::span<const PositionRange> only, const SequenceKv& kv,
                                                     const ModelConfig& config, int num_ranks = 1);

}  // namespace spl::engine
