// What every ChunkStore can do by way of its three basic calls.
#include <cstring>

#include "services/base/status.h"
#include "services/chunk/chunk.h"
#include "services/chunk/chunk_header.h"

namespace spl::chunk {

absl::StatusOr<size_t> ChunkStore::FetchLeading(std::span<const ChunkKey> keys,
                                                std::chrono::steady_clock::time_point deadline,
                                                const std::function<Pieces(const ChunkHeader&)>& place,
                                                const std::function<bool(const ChunkHeader&)>& sink) {
  absl::Status problem;
  const auto copy = [&](Chunk&& chunk) {
    const Pieces pieces = place(chunk.header);
    if (pieces.empty()) return false;
    problem = CheckPieces(chunk.header, pieces);
    if (!problem.ok()) return false;
    const std::byte* from = chunk.payload.data();
    for (const std::span<std::byte> piece : pieces) {
      std::memcpy(piece.data(), from, piece.size());
      from += piece.size();
    }
    return sink(chunk.header);
  };
  SPLICE_ASSIGN_OR_RETURN(const size_t accepted, GetLeading(keys, deadline, copy));
  SPLICE_RETURN_IF_ERROR(problem);
  return accepted;
}

absl::StatusOr<PutReport> ChunkStore::PutWith(std::span<const Chunk> chunks, const PutOptions& options,
                                              std::chrono::steady_clock::time_point deadline) {
  if (options.durable || options.require_namespace || options.pin != Pin::kNone) {
    return Errorf(absl::StatusCode::kUnimplemented, "this chunk store keeps no disk, namespaces or pins");
  }
  SPLICE_RETURN_IF_ERROR(Put(chunks, deadline));
  return PutReport{.num_stored = chunks.size()};
}

}  // namespace spl::chunk
