// Converts between segment sources and stored chunks. Chunk i of a segment holds its tokens [64 i, 64 i + 64); the last
// one may hold fewer. The chunk's first token is in slot 0 of every page, whatever slots the source has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Copies chunk `index` into a chunk with header and checksum. Provenance: CANON if nothing was in front of the segment,
// otherwise EXACT, with the hash of the text in front. Errors are those of reading device memory.
absl::StatusOr<chunk::Chunk> PackSegmentChunk(const SegmentSource& source, int32_t index, const chunk::ChunkKey& key,
                                              const Model& model);

struct FetchedSegment {
  std::shared_ptr<const SegmentSource> source;  // null: the store had nothing usable
  int64_t num_bytes = 0;
};
// Fetches the leading chunks of a segment that the store has into pages of `pool`, directly if the host can write them.
// `keys`: those of the segment's chunks. `make_room` is called for each chunk's pages before they are taken. The fetch
// ends early if it returns false, or at a chunk of another model, at other positions or with damaged bytes. Pages of
// chunks that did not come are free again on return.
FetchedSegment FetchSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                            std::span<const int32_t> tokens, const Model& model, PagePool& pool,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool(int64_t num_pages)>& make_room);

// Fetches only these chunks of a segment, ascending. The source has zeros in place of the other chunks' KV, and is not
// whole. All or nothing: null if one of them does not come. `begin`, `context`: from the segment's summary; chunks that
// say otherwise are refused. Takes the pages of the chunks and of one more, for the zeros.
FetchedSegment FetchSegmentChunks(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                  std::span<const int32_t> chunks, std::span<const int32_t> tokens, int32_t begin,
                                  const SourceContext& context, const Model& model, PagePool& pool,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::function<bool(int64_t num_pages)>& make_room);

// The store also has quantized copies of a segment's chunks (quantized_kv.h), for recovery that reads no layer below
// `first_layer`. The version changes with the payload or its meaning.
inline constexpr int32_t kQuantizedVersion = 1;
chunk::ChunkKey QuantizedKeyOf(const chunk::ChunkKey& chunk_key, const chunk::Digest& model_fingerprint,
                               const chunk::Digest& namespace_key, int32_t first_layer);
// Makes the quantized copy of a segment's chunk (PackSegmentChunk), with the same provenance and position. Its compute
// cost is the chunk's, scaled by bytes.
chunk::Chunk QuantizeChunk(const chunk::Chunk& chunk, int32_t first_layer, const Model& model);

// Fetches a segment from quantized copies of all of its chunks, into pages of `pool`, one per head stream and chunk.
// Pages of layers below first_layer have undefined contents. The source is not whole: it serves one request, and no
// lookup for KV may use it. Null: one of the copies does not come, or they are not of one context. `keys`: those of the
// segment's chunks.
FetchedSegment FetchQuantizedSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                     std::span<const int32_t> tokens, const chunk::Digest& namespace_key,
                                     int32_t first_layer, const Model& model, PagePool& pool,
                                     std::chrono::steady_clock::time_point deadline,
                                     const std::function<bool(int64_t num_pages)>& make_room);

}  // namespace spl::engine
