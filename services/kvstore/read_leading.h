// Reads the leading chunks of a list, several at a time where they come from the disk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/kvstore/tiered_store.h"

namespace spl::kvstore {

// Reads of one caller from the disk at a time. One reader waits for each read before the next one, and for its checksum,
// and so gets less than a fast disk gives. How many a disk of several GB/s wants was not measured.
inline constexpr int kReadersAtATime = 8;

struct LeadingChunks {
  std::vector<StoredChunkRef> chunks;  // in registered memory
  absl::Status stopped;                // the error of the chunk behind them; OK: there was none
  bool limited = false;                // max_bytes was reached
};
// Gets chunks in the order of the keys until one is missing or fails, or they have max_bytes (0: no limit). A chunk
// that is in memory is found without another thread. Chunks that were read beyond the end stay in the memory tier.
LeadingChunks ReadLeading(TieredStore& store, std::span<const chunk::ChunkKey> keys, uint64_t max_bytes);

}  // namespace spl::kvstore
