// Compares the text that the KV of a copy was computed behind with the text in front of the copy (docs/segments.md,
// Provenance).
#pragma once

#include <cstdint>
#include <span>

#include "services/chunk/chunk.h"

namespace spl::engine {

struct SegmentHit;  // segment_source.h

enum class CopyContext : uint8_t {
  kSame,      // computed behind the text that is in front of the copy: a prefix in all but place
  kIsolated,  // by itself: its segment began a prompt, behind at most kLeadTokensMax tokens of instructions
  kForeign,   // computed behind other text, or nobody knows behind what
};

// The first tokens of a prompt, up to its first segment and at most so many, may differ where the context is still
// called the same. Such copies answer as well as exact KV (docs/results/2026-11-21-segments.md, "in context").
inline constexpr int32_t kLeadTokensMax = 64;

// Where the KV of a source was computed.
struct SourceContext {
  bool isolated = false;          // nothing but the segment itself was in front of any of its tokens
  chunk::ContextHash front;       // otherwise: the text in front of the source's first token; may be unknown
  chunk::Digest namespace_key{};  // which `front` was made with
};

// Context of tokens [begin, …) of `prompt`, of a segment of this namespace. `first_segment`: where the first segment of
// the prompt begins.
SourceContext SourceContextOf(const chunk::Digest& namespace_key, std::span<const int32_t> prompt, int32_t begin,
                              int32_t first_segment);

// The context that the header of a stored chunk tells of its segment.
SourceContext ContextOfHeader(const chunk::ChunkHeader& header);

// The context of `hit` in a prompt of these tokens. `first_copy`: position of the prompt's first copy, at most the
// hit's. kSame only if all text from the first copy on is what the source has seen, token for token, and at most
// kLeadTokensMax tokens in front of that differ on either side. Equal positions prove nothing: documents that are cut
// to one length have the same positions in every prompt. A source that lacks KV is never kSame. Cost: at most one
// SHA-256 of the text in front.
CopyContext ContextOf(const SegmentHit& hit, std::span<const int32_t> tokens, int32_t first_copy);

}  // namespace spl::engine
