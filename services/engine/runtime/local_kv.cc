#include "services/engine/runtime/local_kv.h"

#include <algorithm>

#include "services/methods/methods.h"

namespace spl::engine {
namespace {

void Append(std::vector<SegmentHit>& hits, const std::vector<SegmentHit>& more) {
  hits.insert(hits.end(), more.begin(), more.end());
}

// The prefix is exact and wins; what is left of a segment behind it must be worth a copy.
void CutAtPrefix(std::vector<SegmentHit>& hits, int32_t prefix) {
  for (SegmentHit& hit : hits) {
    const int32_t cut = std::clamp(prefix - hit.target, 0, hit.num_tokens);
    hit.offset += cut;
    hit.target += cut;
    hit.num_tokens -= cut;
  }
  std::erase_if(hits, [](const SegmentHit& hit) { return hit.num_tokens < kSegmentTokensMin; });
}

}  // namespace

SessionId SessionOf(const PrefillRequest& request) {
  return {request.session, request.namespace_key, request.session_owner};
}

void LocalKv::AppendLeading(PrefillJob& job, SequenceKv& kv) {
  const PrefillRequest& request = job.request;
  const std::span<const chunk::ChunkKey> keys = job.reusable_keys();
  job.stats.session_tokens = 0;
  if (request.prompt_logprobs.has_value()) return;
  if (!request.session.empty()) {
    // A contract is with exact: what another method left of the last turn may not be used.
    ReuseOptions reuse = request.reuse;
    if (request.terms.quality > 0) reuse.policy = methods::kExact;
    const SessionTable::Match match =
        sessions.Find(SessionOf(request), keys, MethodOf(reuse), std::chrono::steady_clock::now());
    if (match.num_pages > static_cast<int64_t>(prefixes.CountLeading(keys))) {
      kv.AppendLeading(*match.kv, match.num_pages);
      job.stats.session_tokens = kv.num_tokens();
      return;
    }
  }
  prefixes.AppendLeading(keys, kv);
}

std::vector<SegmentHit> LocalKv::FindSegments(const PrefillJob& job) {
  if (!job.policy->reuses_segments()) return {};
  const PrefillRequest& request = job.request;
  const auto length = static_cast<int32_t>(request.tokens.size()), prefix = static_cast<int32_t>(job.cached());
  std::vector<SegmentHit> hits;
  for (size_t i = 0; i < request.segments.size(); ++i) {
    const ReuseSpan& segment = request.segments[i];
    if (segment.range.end <= prefix) continue;
    if (const auto part = job.fetched.parts.find(i); part != job.fetched.parts.end()) {
      hits.push_back({part->second, 0, segment.range.begin, segment.range.size(), segment.shared});
      continue;
    }
    auto found = segments.FindSegment(segment.namespace_key, request.tokens, segment.range, segment.frozen);
    if (segment.shared) {
      // A router that does not know shared namespaces may have left a source that stood behind other text; a text
      // inside of a source has seen what its caller put in front of it.
      std::erase_if(found, [](const SegmentHit& hit) { return !hit.source->isolated(); });
      for (SegmentHit& hit : found) hit.shared = true;
      Append(hits, found);
      continue;
    }
    const int32_t rest = found.empty() ? segment.range.begin : found.back().target + found.back().num_tokens;
    Append(hits, found);
    Append(hits, segments.FindText(segment.namespace_key, request.tokens, {std::max(rest, prefix), segment.range.end}));
  }
  if (request.reuse_auto) {
    for (const PositionRange& range : job.UnmarkedText({prefix, length}))
      Append(hits, segments.FindText(request.namespace_key, request.tokens, range));
    std::sort(hits.begin(), hits.end(), [](const SegmentHit& a, const SegmentHit& b) { return a.target < b.target; });
  }
  CutAtPrefix(hits, prefix);
  return hits;
}

std::shared_ptr<const SegmentSource> LocalKv::WholeSourceOf(const PrefillJob& job, const ReuseSpan& segment) {
  const auto hits = segments.FindSegment(segment.namespace_key, job.request.tokens, segment.range);
  const auto length = static_cast<size_t>(segment.range.size());
  if (hits.size() != 1 || static_cast<size_t>(hits[0].num_tokens) != length ||
      hits[0].source->tokens().size() != length)
    return nullptr;
  return hits[0].source;
}

}  // namespace spl::engine
