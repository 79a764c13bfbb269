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

// DataLoss: the payload has another size or CRC32C than the header says. Cost: one pass over the payload.
absl::Status VerifyPayload(const ChunkHeader& header, std::span<const std::byte> payload);

}  // namespace spl::chunk
