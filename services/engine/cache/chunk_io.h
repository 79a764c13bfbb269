// Between pages and stored chunks: one chunk is the 64-token pages of every stream, in order [layer][kv_head].
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// A copy of page `page_idx` of every stream, with header and checksum. The page must be full and exact (P2, P3 of
// docs/methods/provenance.md): aborts otherwise. Errors are those of reading device memory.
absl::StatusOr<chunk::Chunk> PackChunk(const SequenceKv& kv, int32_t page_idx, const chunk::ChunkKey& key,
                                       const Model& model);

struct FetchedPrefix {
  int32_t num_chunks = 0;
  int64_t num_bytes = 0;
};
// Brings keys[i] into page first_page + i of every stream of `kv`, which has them and does not count them as written,
// for as many leading keys as the store has, until `stop` says so. Straight into the pages where the host can write
// them. What the store gives wrongly (another model, layout or position, damaged bytes) ends it: the pages from there
// on hold anything and are computed instead. A store that fails costs time, never a request.
FetchedPrefix FetchPrefix(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys, int32_t first_page,
                          const Model& model, SequenceKv& kv, std::chrono::steady_clock::time_point deadline,
                          const std::function<bool()>& stop);

// Whether the chunk was computed with this model and its payload is pages of this layout.
bool IsOfModel(const chunk::ChunkHeader& header, const Model& model);

// Where the payloads of one fetch go: into the pages themselves where the host can write them; else into memory of its
// own, from which Land copies. Calls one at a time, as ChunkStore::FetchLeading makes them.
class ChunkLanding {
 public:
  ChunkLanding(PagePool& pool, size_t payload_bytes) : pool_(pool), payload_bytes_(payload_bytes) {}

  // For chunk `index`, whose payload is these pages in this order. The same answer when asked again.
  chunk::Pieces PiecesFor(size_t index, std::span<const int32_t> pages);
  // Its bytes are in the pieces and verified. Errors are those of writing device memory.
  absl::Status Land(size_t index, std::span<const int32_t> pages);

 private:
  PagePool& pool_;
  const size_t payload_bytes_;
  std::map<size_t, std::vector<std::byte>> staged_;  // of a device pool; as many as the store has under way
  std::vector<std::vector<std::byte>> spare_;
};

// Bytes of one chunk's payload.
inline size_t ChunkPayloadBytes(const Model& model) {
  return static_cast<size_t>(model.config().num_layers) * model.config().num_kv_heads * model.page_bytes();
}

}  // namespace spl::engine
