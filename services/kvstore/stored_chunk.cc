#include "services/kvstore/stored_chunk.h"

#include <cstring>

#include "services/kvstore/slab_file.h"

namespace spl::kvstore {

StoredChunkRef FinishChunk(std::shared_ptr<ChunkRecord> record, const chunk::ChunkHeader& header, SlotBuffer slot) {
  const auto encoded = chunk::EncodeHeader(header);
  std::memcpy(slot.data(), encoded.data(), encoded.size());
  const uint64_t bytes = encoded.size() + header.payload_bytes;
  std::memset(slot.data() + bytes, 0, PaddedBytes(header.payload_bytes) - bytes);
  return std::make_shared<const StoredChunk>(StoredChunk{std::move(record), header, std::move(slot)});
}

}  // namespace spl::kvstore
