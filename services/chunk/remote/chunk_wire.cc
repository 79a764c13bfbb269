#include "services/chunk/remote/chunk_wire.h"

#include <algorithm>
#include <cstring>

#include "services/base/status.h"
#include "services/chunk/chunk_header.h"

namespace spl::chunk {
namespace {

constexpr int kMaxKeys = 1 << 16;

absl::Status CopyDigest(const std::string& bytes, const char* field, Digest& to) {
  if (bytes.size() != to.size()) return InvalidArgument("{} has {} bytes, not 32", field, bytes.size());
  std::memcpy(to.data(), bytes.data(), to.size());
  return absl::OkStatus();
}

std::string ToBytes(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// The digest, then `lead` as four bytes, little-endian; empty: unknown.
std::string ToBytes(const ContextHash& context) {
  std::string bytes(reinterpret_cast<const char*>(context.digest.data()), context.digest.size());
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(context.lead >> shift));
  return bytes;
}

absl::StatusOr<ContextHash> ContextFromBytes(const std::string& bytes) {
  ContextHash context;
  if (bytes.empty()) return context;
  constexpr size_t kDigestBytes = sizeof(context.digest);
  if (bytes.size() != kDigestBytes + 4) return InvalidArgument("meta.context has {} bytes, not 16", bytes.size());
  std::memcpy(context.digest.data(), bytes.data(), kDigestBytes);
  for (int i = 0; i < 4; ++i)
    context.lead |= uint32_t{static_cast<uint8_t>(bytes[kDigestBytes + static_cast<size_t>(i)])} << (8 * i);
  return context;
}

}  // namespace

v1::ChunkMeta MetaFromHeader(const ChunkHeader& header) {
  v1::ChunkMeta meta;
  meta.set_key(ToBytes(header.key.bytes));
  meta.set_model_fingerprint(ToBytes(header.model_fingerprint));
  meta.set_layout_digest(ToBytes(header.layout_digest));
  meta.set_num_tokens(header.num_tokens);
  meta.set_first_position(header.first_position);
  meta.set_provenance(static_cast<uint32_t>(header.provenance));
  meta.set_payload_bytes(header.payload_bytes);
  meta.set_payload_crc32c(header.payload_crc32c);
  if (header.namespace_id != kDefaultNamespace) meta.set_namespace_id(ToBytes(header.namespace_id));
  meta.set_recompute_seconds(header.recompute_seconds);
  if (header.context.known()) meta.set_context(ToBytes(header.context));
  return meta;
}

absl::StatusOr<ChunkHeader> HeaderFromMeta(const v1::ChunkMeta& meta) {
  ChunkHeader header;
  SPLICE_RETURN_IF_ERROR(CopyDigest(meta.key(), "meta.key", header.key.bytes));
  SPLICE_RETURN_IF_ERROR(CopyDigest(meta.model_fingerprint(), "meta.model_fingerprint", header.model_fingerprint));
  SPLICE_RETURN_IF_ERROR(CopyDigest(meta.layout_digest(), "meta.layout_digest", header.layout_digest));
  header.num_tokens = meta.num_tokens();
  header.first_position = meta.first_position();
  if (meta.provenance() > UINT8_MAX) return InvalidArgument("provenance {} is unknown", meta.provenance());
  header.provenance = static_cast<Provenance>(meta.provenance());
  header.payload_bytes = meta.payload_bytes();
  header.payload_crc32c = meta.payload_crc32c();
  SPLICE_ASSIGN_OR_RETURN(header.namespace_id, NamespaceFromBytes(meta.namespace_id()));
  header.recompute_seconds = meta.recompute_seconds();
  SPLICE_ASSIGN_OR_RETURN(header.context, ContextFromBytes(meta.context()));
  SPLICE_RETURN_IF_ERROR(CheckHeaderFields(header));
  return header;
}

absl::StatusOr<ChunkKey> KeyFromBytes(const std::string& bytes) {
  ChunkKey key;
  SPLICE_RETURN_IF_ERROR(CopyDigest(bytes, "key", key.bytes));
  return key;
}

absl::StatusOr<std::vector<ChunkKey>> KeysFromWire(const google::protobuf::RepeatedPtrField<std::string>& wire) {
  if (wire.size() > kMaxKeys) return InvalidArgument("keys: {} are more than {}", wire.size(), kMaxKeys);
  std::vector<ChunkKey> keys;
  keys.reserve(wire.size());
  for (const std::string& bytes : wire) {
    SPLICE_ASSIGN_OR_RETURN(const ChunkKey key, KeyFromBytes(bytes));
    keys.push_back(key);
  }
  return keys;
}

absl::StatusOr<Digest> NamespaceFromBytes(const std::string& bytes) {
  Digest id = kDefaultNamespace;
  if (!bytes.empty()) SPLICE_RETURN_IF_ERROR(CopyDigest(bytes, "namespace_id", id));
  return id;
}

v1::PutOptions PutOptionsToWire(const PutOptions& options) {
  v1::PutOptions wire;
  wire.set_durable(options.durable);
  wire.set_require_namespace(options.require_namespace);
  wire.set_pin(static_cast<v1::Pin>(options.pin));
  return wire;
}

absl::StatusOr<PutOptions> PutOptionsFromWire(const v1::PutOptions& wire) {
  SPLICE_ASSIGN_OR_RETURN(const Pin pin, PinFromWire(wire.pin()));
  return PutOptions{wire.durable(), wire.require_namespace(), pin};
}

absl::StatusOr<Pin> PinFromWire(v1::Pin pin) {
  if (pin != v1::PIN_NONE && pin != v1::PIN_SOFT && pin != v1::PIN_HARD) {
    return InvalidArgument("pin {} is not 0 (none), 1 (soft) or 2 (hard)", static_cast<int>(pin));
  }
  return static_cast<Pin>(pin);
}

bool ChunkCutter::Next(v1::ChunkPart& part) {
  part.Clear();
  if (started_ && offset_ >= payload_.size()) return false;
  if (!started_) *part.mutable_meta() = MetaFromHeader(header_);
  started_ = true;
  const size_t bytes = std::min(kPartBytes, payload_.size() - offset_);
  part.set_data(payload_.data() + offset_, bytes);
  offset_ += bytes;
  part.set_last(offset_ >= payload_.size());
  return true;
}

absl::StatusOr<std::optional<Chunk>> ChunkAssembler::Add(const v1::ChunkPart& part) {
  if (part.has_meta() == pending_) {
    return InvalidArgument("{}",
                           pending_ ? "meta: the chunk before it has not ended" : "meta is missing on a first part");
  }
  if (part.has_meta()) {
    SPLICE_ASSIGN_OR_RETURN(chunk_.header, HeaderFromMeta(part.meta()));
    chunk_.payload.clear();
    pending_ = true;
  }
  if (part.data().size() > kPartBytes)
    return InvalidArgument("data has {} bytes, at most {}", part.data().size(), kPartBytes);
  if (part.data().size() > chunk_.header.payload_bytes - chunk_.payload.size()) {
    return InvalidArgument("data goes beyond the payload_bytes {}", chunk_.header.payload_bytes);
  }
  const auto* const from = reinterpret_cast<const std::byte*>(part.data().data());
  if (chunk_.payload.empty() && part.last()) chunk_.payload.reserve(part.data().size());
  chunk_.payload.insert(chunk_.payload.end(), from, from + part.data().size());
  if (!part.last()) return std::optional<Chunk>();
  pending_ = false;
  SPLICE_RETURN_IF_ERROR(VerifyPayload(chunk_.header, chunk_.payload));
  return std::optional<Chunk>(std::exchange(chunk_, Chunk()));
}

}  // namespace spl::chunk
