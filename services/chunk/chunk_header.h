// Checks on chunk headers and payloads beyond encoding: what every border applies before bytes are believed.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"

namespace spl::chunk {

// No page layout comes near; larger sizes are damage or attack.
inline constexpr uint64_t kMaxPayloadBytes = 256ull << 20;

// InvalidArgument naming the field: num_tokens 1 to 64, a known provenance, payload_bytes 1 to kMaxPayloadBytes.
absl::Status CheckHeaderFields(const ChunkHeader& header);

// FailedPrecondition naming both sides: the chunk was computed with another model, or its payload has another page
// layout, than the reader's (or than a chunk that has the same key).
absl::Status CheckSameModel(const ChunkHeader& header, const Digest& model_fingerprint, const Digest& layout_digest);

// DataLoss: the payload has another size or CRC32C than the header says. Cost: one pass over the payload.
absl::Status VerifyPayload(const ChunkHeader& header, std::span<const std::byte> payload);
// The same for a payload in pieces.
absl::Status VerifyPieces(const ChunkHeader& header, const Pieces& pieces);

// InvalidArgument: the sizes do not add up to the header's payload_bytes.
absl::Status CheckPieces(const ChunkHeader& header, const Pieces& pieces);

}  // namespace spl::chunk
