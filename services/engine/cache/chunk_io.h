// Between pages and stored chunks: one chunk is the 64-token pages of every stream, in order [layer][kv_head].
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// A copy of page `page_idx` of every stream, with header and checksum. The page must be full and exact (P2, P3 of
// algorithms.md 6.3): aborts otherwise. Errors are those of reading device memory.
absl::StatusOr<chunk::Chunk> PackChunk(const SequenceKv& kv, int32_t page_idx, const chunk::ChunkKey& key,
                                       const Model& model);

// Writes the payload into page `page_idx` of every stream. DataLoss / FailedPrecondition when the chunk is not one of
// this model, layout, or position; the caller drops it and computes instead.
absl::Status UnpackChunk(const chunk::Chunk& chunk, const Model& model, int32_t page_idx, SequenceKv& kv);

// Bytes of one chunk's payload.
inline size_t ChunkPayloadBytes(const Model& model) {
  return static_cast<size_t>(model.config().num_layers) * model.config().num_kv_heads * model.page_bytes();
}

}  // namespace spl::engine
