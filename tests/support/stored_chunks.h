// Chunks as the store's tiers take them.
#pragma once

#include <cstring>
#include <memory>

#include "services/base/check.h"
#include "services/kvstore/chunk_catalog.h"
#include "services/kvstore/slab_file.h"
#include "services/kvstore/stored_chunk.h"
#include "tests/support/chunks.h"

namespace spl::testing {

// In memory of its own, or in `slot`. Aborts the test when the catalogue refuses it.
inline kvstore::StoredChunkRef Stored(kvstore::ChunkCatalog& catalog, const chunk::Chunk& chunk,
                                      const chunk::PutOptions& options = {},
                                      std::optional<kvstore::SlotBuffer> slot = std::nullopt) {
  auto record = catalog.Admit(chunk.header, options);
  SPLICE_CHECK(record.ok(), record.status().ToString().c_str());
  if (!slot.has_value()) slot = kvstore::SlotBuffer::OnHeap(kvstore::SlotBytesFor(chunk.payload.size()));
  std::memcpy(slot->data() + chunk::kEncodedHeaderBytes, chunk.payload.data(), chunk.payload.size());
  return kvstore::FinishChunk(std::move(record).value(), chunk.header, std::move(*slot));
}

inline chunk::Chunk Copy(const kvstore::StoredChunk& stored) {
  const auto payload = stored.payload();
  return {stored.header, {payload.begin(), payload.end()}};
}

inline std::optional<kvstore::SlotBuffer> HeapSlot(uint64_t payload_bytes) {
  return kvstore::SlotBuffer::OnHeap(kvstore::SlotBytesFor(payload_bytes));
}

}  // namespace spl::testing
