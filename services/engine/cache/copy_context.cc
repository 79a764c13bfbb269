#include "services/engine/cache/copy_context.h"

#include <algorithm>

#include "services/engine/cache/segment_source.h"

namespace spl::engine {
namespace {

// Length of the common end of the two.
int64_t CommonEnd(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin();
}

}  // namespace

SourceContext SourceContextOf(const chunk::Digest& namespace_key, std::span<const int32_t> prompt, int32_t begin,
                              int32_t first_segment) {
  SourceContext context{.isolated = begin == 0, .front = {}, .namespace_key = namespace_key};
  const auto lead = static_cast<uint32_t>(std::min({begin, first_segment, kLeadTokensMax}));
  if (!context.isolated) context.front = chunk::MakeContextHash(namespace_key, prompt.first(begin), lead);
  return context;
}

SourceContext ContextOfHeader(const chunk::ChunkHeader& header) {
  return {header.provenance == chunk::Provenance::kCanon, header.context, header.namespace_id};
}

CopyContext ContextOf(const SegmentHit& hit, std::span<const int32_t> tokens, int32_t first_copy) {
  const SegmentSource& source = *hit.source;
  const SourceContext& context = source.context();
  if (!source.is_whole()) return context.isolated ? CopyContext::kIsolated : CopyContext::kForeign;
  // Same from a position on behind these numbers of tokens, which differ.
  const auto same_behind = [&](int64_t seen, int64_t here) {
    return std::max(seen, here) <= kLeadTokensMax && here <= first_copy ? CopyContext::kSame : CopyContext::kForeign;
  };
  // The source's own tokens in front of the copied ones, then what was in front of the source.
  const int64_t own = hit.offset, same_own = CommonEnd(tokens.first(hit.target), source.tokens().first(hit.offset));
  if (same_own < own) return same_behind(source.begin() + own - same_own, hit.target - same_own);
  if (context.isolated) return hit.target == own ? CopyContext::kSame : CopyContext::kIsolated;
  if (!context.front.known()) return CopyContext::kForeign;
  const int64_t lead = context.front.lead, size = source.begin() - lead, here = hit.target - own - size;
  if (size < 0) return CopyContext::kForeign;
  // A segment that was the first of its prompt has seen a few tokens of instructions.
  const CopyContext other = size == 0 ? CopyContext::kIsolated : CopyContext::kForeign;
  if (here < 0 || same_behind(lead, here) != CopyContext::kSame) return other;
  const std::span<const int32_t> text = tokens.subspan(static_cast<size_t>(here), static_cast<size_t>(size));
  chunk::ContextHash hash = chunk::MakeContextHash(context.namespace_key, text, 0);
  hash.lead = context.front.lead;
  return hash == context.front ? CopyContext::kSame : other;
}

}  // namespace spl::engine
