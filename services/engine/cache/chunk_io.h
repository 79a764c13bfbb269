// Converts between pages and stored chunks. A chunk is one 64-token page of every head stream, in order
// [layer][kv_head].
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

// Copies page `page_idx` of every stream into a chunk with header and checksum. REQUIRES: the page is full and exact
// (P2, P3 of docs/methods/provenance.md); aborts otherwise. Errors are those of reading device memory.
absl::StatusOr<chunk::Chunk> PackChunk(const SequenceKv& kv, int32_t page_idx, const chunk::ChunkKey& key,
                                       const Model& model);

struct FetchedPrefix {
  int32_t num_chunks = 0;
  int64_t num_bytes = 0;
};
// Fetches keys[i] into page first_page + i of every stream of `kv`, for as many leading keys as the store has, until
// `stop` returns true or the deadline. `kv` already has these pages and does not count them as written. Bytes go
// straight into the pages if the host can write them. A chunk of another model, layout or position, or with damaged
// bytes, ends the fetch: later pages have undefined contents and are computed instead. A store that fails costs time,
// never a request.
FetchedPrefix FetchPrefix(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys, int32_t first_page,
                          const Model& model, SequenceKv& kv, std::chrono::steady_clock::time_point deadline,
                          const std::function<bool()>& stop);

// True if the chunk was computed with this model and its payload is pages of the model's layout.
bool IsOfModel(const chunk::ChunkHeader& header, const Model& model);

// Gives the payloads of one fetch their places: the pages themselves if the host can write them; otherwise own host
// memory, from which Land copies. One thread at a time, as ChunkStore::FetchLeading calls it.
class ChunkLanding {
 public:
  ChunkLanding(PagePool& pool, size_t payload_bytes) : pool_(pool), payload_bytes_(payload_bytes) {}

  // Places for chunk `index`, whose payload is these pages in this order. A repeated call gives the same places.
  chunk::Pieces PiecesFor(size_t index, std::span<const int32_t> pages);
  // Call when the chunk's bytes are in the pieces and verified: brings them into the pages. Errors are those of writing
  // device memory.
  absl::Status Land(size_t index, std::span<const int32_t> pages);

 private:
  PagePool& pool_;
  const size_t payload_bytes_;
  std::map<size_t, std::vector<std::byte>> staged_;  // for pools in device memory; as many as are in flight
  std::vector<std::vector<std::byte>> spare_;
};

// Size of one chunk's payload in bytes.
inline size_t ChunkPayloadBytes(const Model& model) {
  return static_cast<size_t>(model.config().num_layers) * model.config().num_kv_heads * model.page_bytes();
}

}  // namespace spl::engine
