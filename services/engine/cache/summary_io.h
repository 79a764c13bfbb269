// Converts between summaries of segments and stored chunks. A segment's summary is a chunk of its own, besides those of
// its KV. Its key follows from the key of the segment's last chunk, so that a worker that knows the text can fetch it
// without the KV. docs/data-formats.md has the bytes.
#pragma once

#include <chrono>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/cache/segment_summary.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Changes with the payload or its meaning; summaries that an older build stored are then no longer found.
inline constexpr int32_t kSummaryVersion = 2;

// `segment_keys`: the keys of all of the segment's chunks; at least one.
chunk::ChunkKey SummaryKeyOf(std::span<const chunk::ChunkKey> segment_keys, const chunk::Digest& model_fingerprint,
                             const chunk::Digest& namespace_key);

// Makes the chunk, with header and checksum. Provenance, context and first position are the source's. REQUIRES: tile
// means of the whole source; attended tokens if there is a local query.
chunk::Chunk PackSummary(const SegmentSource& source, const SegmentSummary& summary, const chunk::ChunkKey& key,
                         const Model& model);

struct FetchedSummary {
  SegmentSummary summary;
  int32_t begin = 0;      // position of the segment's first token when KV and summary were computed
  SourceContext context;  // where they were computed
  int64_t num_bytes = 0;
};
// Fetches the summary of a segment of `num_tokens`. nullopt: the store has none, or it is of another model or length,
// or damaged (including offsets that are out of order). A store that fails costs time, never a request.
std::optional<FetchedSummary> FetchSummary(chunk::ChunkStore& store, const chunk::ChunkKey& key, size_t num_tokens,
                                           const Model& model, std::chrono::steady_clock::time_point deadline);

}  // namespace spl::engine
