#include "services/engine/runtime/prompt_layout.h"

#include "services/base/check.h"

namespace spl::engine {

ReuseLayout LayoutOf(std::span<const int32_t> tokens, int64_t num_prefix, std::span<const SegmentHit> hits) {
  ReuseLayout layout{static_cast<int32_t>(tokens.size()), static_cast<int32_t>(num_prefix), {}, {}};
  int32_t end = layout.num_prefix;
  for (const SegmentHit& hit : hits) {
    SPLICE_CHECK(hit.target >= end && hit.num_tokens > 0 && hit.target + hit.num_tokens <= layout.num_tokens,
                 "hits ascend behind the prefix");
    end = hit.target + hit.num_tokens;
    layout.reused.push_back({hit.target, end});
    layout.contexts.push_back(ContextOf(hit, tokens, hits.front().target));
    layout.copies_are_whole &= hit.source->is_whole();
  }
  return layout;
}

CopiedTokens CountCopies(const ReuseLayout& layout) {
  CopiedTokens copied;
  for (size_t i = 0; i < layout.reused.size(); ++i) {
    const int64_t size = layout.reused[i].size();
    if (layout.contexts[i] == CopyContext::kSame) copied.same_context += size;
    if (layout.contexts[i] == CopyContext::kIsolated) copied.isolated += size;
    if (layout.contexts[i] == CopyContext::kForeign) copied.foreign += size;
  }
  return copied;
}

PositionRanges ForeignCopies(const ReuseLayout& layout) {
  PositionRanges foreign;
  for (size_t i = 0; i < layout.reused.size(); ++i) {
    if (layout.contexts[i] == CopyContext::kForeign) foreign.push_back(layout.reused[i]);
  }
  return foreign;
}

RecomputedTokens CountRecomputed(const PositionRanges& rows, const EdgeRows& edges) {
  PositionRanges left = rows;
  const auto take = [&left](const PositionRanges& reason) {
    const int64_t before = CountOf(left);
    left = IntersectionOf(left, ComplementOf(reason, {0, INT32_MAX}));
    return before - CountOf(left);
  };
  RecomputedTokens count;
  count.links = take(edges.links);
  count.beside_new = take(edges.beside_new);
  count.tail = take(edges.tail);
  count.chosen = CountOf(left);
  return count;
}

}  // namespace spl::engine
