// Between segment sources and stored chunks. Chunk i of a segment holds its tokens [64 i, 64 i + 64), the last one
// perhaps fewer, the first of them in slot 0 of every page, whatever slots they have here.
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

// A copy of chunk `index`, with header and checksum. Provenance: EXACT where it stood behind other text, CANON where
// nothing stood in front. Errors are those of reading device memory.
absl::StatusOr<chunk::Chunk> PackSegmentChunk(const SegmentSource& source, int32_t index, const chunk::ChunkKey& key,
                                              const Model& model);

struct FetchedSegment {
  std::shared_ptr<const SegmentSource> source;  // null: nothing was stored
  int64_t num_bytes = 0;
};
// The leading chunks of a segment that the store has, in pages of `pool`, straight into them where the host can write
// them. `keys` are those of the segment's chunks. `make_room` is asked for each chunk's pages before they are taken;
// false ends the segment early, as does what the store gives wrongly (another model, other positions, damaged bytes).
// Pages of chunks that did not come are free again on return.
FetchedSegment FetchSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                            std::span<const int32_t> tokens, const Model& model, PagePool& pool,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool(int64_t num_pages)>& make_room);

// Of a segment only these of its chunks, ascending; in place of the others' KV the source has zeros, and it is not
// whole. All or nothing: null when one of them does not come. `begin`, `isolated`: as the segment's summary says;
// chunks that say otherwise are refused. Takes the pages of the chunks and of one more.
FetchedSegment FetchSegmentChunks(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                  std::span<const int32_t> chunks, std::span<const int32_t> tokens, int32_t begin,
                                  bool isolated, const Model& model, PagePool& pool,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::function<bool(int64_t num_pages)>& make_room);

// Beside a segment's chunks stand their quantized copies (quantized_kv.h), for recovery that reads no layer below
// `first_layer`. Changes when the payload or its meaning does.
inline constexpr int32_t kQuantizedVersion = 1;
chunk::ChunkKey QuantizedKeyOf(const chunk::ChunkKey& chunk_key, const chunk::Digest& model_fingerprint,
                               const chunk::Digest& namespace_key, int32_t first_layer);
// Of a chunk of a segment, as PackSegmentChunk makes it, with its provenance and position; what it cost to compute is
// shared out by bytes.
chunk::Chunk QuantizeChunk(const chunk::Chunk& chunk, int32_t first_layer, const Model& model);

// A segment from quantized copies of all of its chunks, in pages of `pool`, one for each head stream and chunk; those
// of layers below first_layer hold anything. The source is not whole: it is for one request, and for nobody who wants
// KV. Null when one of them does not come, or they are not of one context. `keys` are those of the segment's chunks.
FetchedSegment FetchQuantizedSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                     std::span<const int32_t> tokens, const chunk::Digest& namespace_key,
                                     int32_t first_layer, const Model& model, PagePool& pool,
                                     std::chrono::steady_clock::time_point deadline,
                                     const std::function<bool(int64_t num_pages)>& make_room);

}  // namespace spl::engine
