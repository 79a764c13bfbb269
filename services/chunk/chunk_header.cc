#include "services/chunk/chunk_header.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/ids.h"
#include "services/base/status.h"

namespace spl::chunk {
namespace {

// Byte offsets; docs/data-formats.md has the table.
constexpr char kMagic[] = {'S', 'P', 'L', 'C', 'H', 'U', 'N', 'K'};
constexpr uint32_t kVersion = 1;
constexpr size_t kVersionAt = 8;
constexpr size_t kSizeAt = 12;
constexpr size_t kKeyAt = 16;
constexpr size_t kFingerprintAt = 48;
constexpr size_t kLayoutAt = 80;
constexpr size_t kNumTokensAt = 112;
constexpr size_t kFirstPositionAt = 116;
constexpr size_t kProvenanceAt = 120;
constexpr size_t kPayloadCrcAt = 124;
constexpr size_t kPayloadBytesAt = 128;
constexpr size_t kNamespaceAt = 136;
constexpr size_t kRecomputeSecondsAt = 168;
constexpr size_t kContextAt = 172;  // zeros in headers of older builds: unknown
constexpr size_t kContextLeadAt = 184;
constexpr size_t kHeaderCrcAt = kEncodedHeaderBytes - 4;

// Byte by byte: little-endian on every host, and no alignment is asked for.
template <typename T>
void Store(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
}

template <typename T>
T Load(const std::byte* from) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return static_cast<T>(value);
}

absl::Status DataLoss(const std::string& message) {
  return Errorf(absl::StatusCode::kDataLoss, "chunk header: {}", message);
}

}  // namespace

std::array<std::byte, kEncodedHeaderBytes> EncodeHeader(const ChunkHeader& header) {
  std::array<std::byte, kEncodedHeaderBytes> bytes{};
  std::memcpy(bytes.data(), kMagic, sizeof(kMagic));
  Store<uint32_t>(&bytes[kVersionAt], kVersion);
  Store<uint32_t>(&bytes[kSizeAt], kEncodedHeaderBytes);
  std::memcpy(&bytes[kKeyAt], header.key.bytes.data(), 32);
  std::memcpy(&bytes[kFingerprintAt], header.model_fingerprint.data(), 32);
  std::memcpy(&bytes[kLayoutAt], header.layout_digest.data(), 32);
  Store<uint32_t>(&bytes[kNumTokensAt], header.num_tokens);
  Store<uint32_t>(&bytes[kFirstPositionAt], header.first_position);
  Store<uint8_t>(&bytes[kProvenanceAt], static_cast<uint8_t>(header.provenance));
  Store<uint32_t>(&bytes[kPayloadCrcAt], header.payload_crc32c);
  Store<uint64_t>(&bytes[kPayloadBytesAt], header.payload_bytes);
  std::memcpy(&bytes[kNamespaceAt], header.namespace_id.data(), 32);
  Store<uint32_t>(&bytes[kRecomputeSecondsAt], std::bit_cast<uint32_t>(header.recompute_seconds));
  std::memcpy(&bytes[kContextAt], header.context.digest.data(), header.context.digest.size());
  Store<uint32_t>(&bytes[kContextLeadAt], header.context.lead);
  Store<uint32_t>(&bytes[kHeaderCrcAt], kernels::Crc32cExtend(0, bytes.data(), kHeaderCrcAt));
  return bytes;
}

absl::StatusOr<ChunkHeader> DecodeHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < kEncodedHeaderBytes) return DataLoss(fmt::format("{} bytes are too few", bytes.size()));
  if (std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) return DataLoss("wrong magic");
  if (Load<uint32_t>(&bytes[kHeaderCrcAt]) != kernels::Crc32cExtend(0, bytes.data(), kHeaderCrcAt)) {
    return DataLoss("its checksum differs");
  }
  const uint32_t version = Load<uint32_t>(&bytes[kVersionAt]);
  if (version != kVersion) return DataLoss(fmt::format("version {} is not {}", version, kVersion));
  if (Load<uint32_t>(&bytes[kSizeAt]) != kEncodedHeaderBytes) return DataLoss("wrong header size");
  ChunkHeader header;
  std::memcpy(header.key.bytes.data(), &bytes[kKeyAt], 32);
  std::memcpy(header.model_fingerprint.data(), &bytes[kFingerprintAt], 32);
  std::memcpy(header.layout_digest.data(), &bytes[kLayoutAt], 32);
  header.num_tokens = Load<uint32_t>(&bytes[kNumTokensAt]);
  header.first_position = Load<uint32_t>(&bytes[kFirstPositionAt]);
  header.provenance = static_cast<Provenance>(Load<uint8_t>(&bytes[kProvenanceAt]));
  header.payload_crc32c = Load<uint32_t>(&bytes[kPayloadCrcAt]);
  header.payload_bytes = Load<uint64_t>(&bytes[kPayloadBytesAt]);
  std::memcpy(header.namespace_id.data(), &bytes[kNamespaceAt], 32);
  header.recompute_seconds = std::bit_cast<float>(Load<uint32_t>(&bytes[kRecomputeSecondsAt]));
  std::memcpy(header.context.digest.data(), &bytes[kContextAt], header.context.digest.size());
  header.context.lead = Load<uint32_t>(&bytes[kContextLeadAt]);
  if (const absl::Status fields = CheckHeaderFields(header); !fields.ok()) return DataLoss(MessageOf(fields));
  return header;
}

absl::Status CheckHeaderFields(const ChunkHeader& header) {
  if (header.num_tokens < 1 || header.num_tokens > kChunkTokens) {
    return InvalidArgument("num_tokens {} is not from 1 to {}", header.num_tokens, kChunkTokens);
  }
  if (header.provenance != Provenance::kApprox && header.provenance != Provenance::kCanon &&
      header.provenance != Provenance::kExact) {
    return InvalidArgument("provenance {} is unknown", static_cast<int>(header.provenance));
  }
  if (header.payload_bytes < 1 || header.payload_bytes > kMaxPayloadBytes) {
    return InvalidArgument("payload_bytes {} is not from 1 to {}", header.payload_bytes, kMaxPayloadBytes);
  }
  if (!std::isfinite(header.recompute_seconds) || header.recompute_seconds < 0) {
    return InvalidArgument("recompute_seconds {} is not a time", header.recompute_seconds);
  }
  return absl::OkStatus();
}

absl::Status CheckSameModel(const ChunkHeader& header, const Digest& model_fingerprint, const Digest& layout_digest) {
  if (header.model_fingerprint != model_fingerprint) {
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "chunk {} was computed with model {}, not with {}; give each model a namespace or store of its own",
                  header.key.ToHex(), HexEncode(header.model_fingerprint), HexEncode(model_fingerprint));
  }
  if (header.layout_digest != layout_digest) {
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "chunk {} has page layout {}, not {}; run its workers with the same --kv-dtype", header.key.ToHex(),
                  HexEncode(header.layout_digest), HexEncode(layout_digest));
  }
  return absl::OkStatus();
}

absl::Status VerifyPayload(const ChunkHeader& header, std::span<const std::byte> payload) {
  // The pieces are only read.
  return VerifyPieces(header, {{const_cast<std::byte*>(payload.data()), payload.size()}});
}

absl::Status VerifyPieces(const ChunkHeader& header, const Pieces& pieces) {
  uint64_t size = 0;
  uint32_t crc = 0;
  for (const std::span<std::byte> piece : pieces) size += piece.size();
  if (size != header.payload_bytes) {
    return Errorf(absl::StatusCode::kDataLoss, "chunk {}: {} payload bytes, its header says {}", header.key.ToHex(),
                  size, header.payload_bytes);
  }
  for (const std::span<std::byte> piece : pieces) crc = kernels::Crc32cExtend(crc, piece.data(), piece.size());
  if (crc == header.payload_crc32c) return absl::OkStatus();
  return Errorf(absl::StatusCode::kDataLoss, "chunk {}: payload checksum {:08x}, its header says {:08x}",
                header.key.ToHex(), crc, header.payload_crc32c);
}

absl::Status CheckPieces(const ChunkHeader& header, const Pieces& pieces) {
  uint64_t size = 0;
  for (const std::span<std::byte> piece : pieces) size += piece.size();
  if (size == header.payload_bytes) return absl::OkStatus();
  return InvalidArgument("chunk {}: the pieces have {} bytes, its payload {}", header.key.ToHex(), size,
                         header.payload_bytes);
}

}  // namespace spl::chunk
