// One chunk in memory: its record, its header, and its slot.
#pragma once

#include <memory>
#include <span>

#include "services/chunk/chunk.h"
#include "services/kvstore/chunk_catalog.h"
#include "services/kvstore/payload_memory.h"

namespace spl::kvstore {

// Immutable once shared. The slot holds the encoded header, the payload, and zeros up to a multiple of 4096.
struct StoredChunk {
  std::shared_ptr<ChunkRecord> record;
  chunk::ChunkHeader header;
  SlotBuffer slot;

  std::span<std::byte> payload() const {
    return {slot.data() + chunk::kEncodedHeaderBytes, static_cast<size_t>(header.payload_bytes)};
  }
};

using StoredChunkRef = std::shared_ptr<const StoredChunk>;

// Makes a shared chunk of a slot that has the payload: writes header and padding around it. Does not verify.
StoredChunkRef FinishChunk(std::shared_ptr<ChunkRecord> record, const chunk::ChunkHeader& header, SlotBuffer slot);

}  // namespace spl::kvstore
