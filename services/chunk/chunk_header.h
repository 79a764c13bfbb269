// Checks of chunk headers and payloads beyond decoding; every border applies them before it trusts the bytes.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"

namespace spl::chunk {

// Larger than the payload of any page layout; larger sizes are damage or an attack.
inline constexpr uint64_t kMaxPayloadBytes = 256ull << 20;

// InvalidArgument names the field: num_tokens 1 to 64, a known provenance, payload_bytes 1 to kMaxPayloadBytes.
absl::Status CheckHeaderFields(const ChunkHeader& header);

// FailedPrecondition names both sides: the chunk has another model or page layout than the reader (or than a chunk with
// the same key).
absl::Status CheckSameModel(const ChunkHeader& header, const Digest& model_fingerprint, const Digest& layout_digest);

// DataLoss: size or CRC32C of the payload differ from the header. Cost: one pass over the payload.
absl::Status VerifyPayload(const ChunkHeader& header, std::span<const std::byte> payload);
// The same for a payload in pieces.
absl::Status VerifyPieces(const ChunkHeader& header, const Pieces& pieces);

// InvalidArgument: the sizes do not add up to the header's payload_bytes.
absl::Status CheckPieces(const ChunkHeader& header, const Pieces& pieces);

}  // namespace spl::chunk
