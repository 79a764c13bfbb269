// Layout of a prompt with copies: where they stand, and behind which text they were computed.
#pragma once

#include <cstdint>
#include <span>

#include "services/engine/cache/segment_source.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/runtime/prefill_stats.h"

namespace spl::engine {

// `hits` are ascending, disjoint and behind the prefix of `num_prefix` tokens, which are fewer than all. Cost: a hash
// of the text in front of each of them.
ReuseLayout LayoutOf(std::span<const int32_t> tokens, int64_t num_prefix, std::span<const SegmentHit> hits);

CopiedTokens CountCopies(const ReuseLayout& layout);
// Copies whose KV was computed behind other text.
PositionRanges ForeignCopies(const ReuseLayout& layout);
// Counts recomputed rows of copies by their reasons; a row that has several counts for the first.
RecomputedTokens CountRecomputed(const PositionRanges& rows, const EdgeRows& edges);

}  // namespace spl::engine
