// Operations that every ChunkStore can build from its three basic calls.
#include <cstring>

#include "services/base/status.h"
#include "services/chunk/chunk.h"
#include "services/chunk/chunk_header.h"

namespace spl::chunk {

void CopyToPieces(std::span<const std::byte> payload, const Pieces& pieces) {
  const std::byte* from = payload.data();
  for (const std::span<std::byte> piece : pieces) {
    std::memcpy(piece.data(), from, piece.size());
    from += piece.size();
  }
}

std::vector<const Chunk*> PointersTo(std::span<const Chunk> chunks) {
  std::vector<const Chunk*> pointers;
  pointers.reserve(chunks.size());
  for (const Chunk& chunk : chunks) pointers.push_back(&chunk);
  return pointers;
}

absl::StatusOr<size_t> ChunkStore::FetchLeading(std::span<const ChunkKey> keys,
                                                std::chrono::steady_clock::time_point deadline, const PlaceFn& place,
                                                const FetchedFn& sink) {
  absl::Status problem;
  size_t index = 0;
  const auto copy = [&](Chunk&& chunk) {
    const Pieces pieces = place(index, chunk.header);
    if (pieces.empty()) return false;
    problem = CheckPieces(chunk.header, pieces);
    if (!problem.ok()) return false;
    CopyToPieces(chunk.payload, pieces);
    return sink(index++, chunk.header);
  };
  SPLICE_ASSIGN_OR_RETURN(const size_t accepted, GetLeading(keys, deadline, copy));
  SPLICE_RETURN_IF_ERROR(problem);
  return accepted;
}

absl::StatusOr<PutReport> ChunkStore::PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                              std::chrono::steady_clock::time_point deadline) {
  if (options.durable || options.require_namespace || options.pin != Pin::kNone) {
    return Errorf(absl::StatusCode::kUnimplemented, "this chunk store keeps no disk, namespaces or pins");
  }
  for (const Chunk* const chunk : chunks) SPLICE_RETURN_IF_ERROR(Put({chunk, 1}, deadline));
  return PutReport{.num_stored = chunks.size()};
}

}  // namespace spl::chunk
