// Between summaries of segments and stored chunks. The summary of a segment is one chunk of its own, beside those of
// its KV, whose key follows from the key of the segment's last chunk: who knows the text finds it, and asks for it
// without its KV. docs/data-formats.md has the bytes.
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

// Changes when the payload or its meaning does: what an older build has stored is then not found any more.
inline constexpr int32_t kSummaryVersion = 2;

// `segment_keys`: of all of the segment's chunks, at least one.
chunk::ChunkKey SummaryKeyOf(std::span<const chunk::ChunkKey> segment_keys, const chunk::Digest& model_fingerprint,
                             const chunk::Digest& namespace_key);

// With header and checksum. Provenance and first position are the source's. REQUIRES: tile means of the whole source;
// with a local query its attended tokens.
chunk::Chunk PackSummary(const SegmentSource& source, const SegmentSummary& summary, const chunk::ChunkKey& key,
                         const Model& model);

struct FetchedSummary {
  SegmentSummary summary;
  int32_t begin = 0;      // position of the segment's first token where both were computed
  bool isolated = false;  // with nothing in front
  int64_t num_bytes = 0;
};
// The summary of a segment of `num_tokens`; null when the store has none, or gives one that is not of this model, not
// as long, or damaged, also where only the order of its offsets shows it. A store that fails costs time, never a
// request.
std::optional<FetchedSummary> FetchSummary(chunk::ChunkStore& store, const chunk::ChunkKey& key, size_t num_tokens,
                                           const Model& model, std::chrono::steady_clock::time_point deadline);

}  // namespace spl::engine
