#include "services/engine/cache/chunk_io.h"

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

absl::StatusOr<chunk::Chunk> PackChunk(const SequenceKv& kv, int32_t page_idx, const chunk::ChunkKey& key,
                                       const Model& model) {
  SPLICE_CHECK((page_idx + 1) * kernels::kPageTokens <= kv.exact_tokens(), "only full pages of exact KV are published");
  chunk::Chunk chunk;
  chunk.payload.resize(ChunkPayloadBytes(model));
  SPLICE_RETURN_IF_ERROR(kv.pool().ReadPages(kv.PagesOfChunk(page_idx), chunk.payload.data()));
  chunk.header = {.key = key,
                  .model_fingerprint = model.fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = kernels::kPageTokens,
                  .first_position = static_cast<uint32_t>(page_idx * kernels::kPageTokens),
                  .provenance = chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size())};
  return chunk;
}

absl::Status UnpackChunk(const chunk::Chunk& chunk, const Model& model, int32_t page_idx, SequenceKv& kv) {
  const chunk::ChunkHeader& header = chunk.header;
  if (header.model_fingerprint != model.fingerprint() || header.layout_digest != model.layout_digest())
    return Errorf(absl::StatusCode::kFailedPrecondition, "chunk {} belongs to another model or page layout",
                  header.key.ToHex());
  if (header.provenance != chunk::Provenance::kExact || header.num_tokens != kernels::kPageTokens ||
      header.first_position != static_cast<uint32_t>(page_idx * kernels::kPageTokens))
    return Errorf(absl::StatusCode::kFailedPrecondition, "chunk {} is not exact KV of position {}", header.key.ToHex(),
                  page_idx * kernels::kPageTokens);
  if (chunk.payload.size() != ChunkPayloadBytes(model))
    return Errorf(absl::StatusCode::kDataLoss, "chunk {} has {} payload bytes, {} are needed", header.key.ToHex(),
                  chunk.payload.size(), ChunkPayloadBytes(model));
  return kv.pool().WritePages(kv.PagesOfChunk(page_idx), chunk.payload.data());
}

}  // namespace spl::engine
