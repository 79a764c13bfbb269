// Chunks as spl.v1.ChunkPart messages, for both ends of the KvStore service.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "spl/v1/kvstore.pb.h"

namespace spl::chunk {

inline constexpr size_t kPartBytes = 1 << 20;

v1::ChunkMeta MetaFromHeader(const ChunkHeader& header);
// InvalidArgument names the field.
absl::StatusOr<ChunkHeader> HeaderFromMeta(const v1::ChunkMeta& meta);
// InvalidArgument: not 32 bytes.
absl::StatusOr<ChunkKey> KeyFromBytes(const std::string& bytes);

// At most 65,536 keys (4 M tokens). InvalidArgument: more, or a key that is not 32 bytes.
absl::StatusOr<std::vector<ChunkKey>> KeysFromWire(const google::protobuf::RepeatedPtrField<std::string>& keys);
// Empty bytes mean the default namespace. InvalidArgument: neither 0 nor 32 bytes.
absl::StatusOr<Digest> NamespaceFromBytes(const std::string& bytes);

v1::PutOptions PutOptionsToWire(const PutOptions& options);
// InvalidArgument names the field.
absl::StatusOr<PutOptions> PutOptionsFromWire(const v1::PutOptions& wire);
absl::StatusOr<Pin> PinFromWire(v1::Pin pin);

// Cuts one chunk into parts. Borrows header and payload.
class ChunkCutter {
 public:
  explicit ChunkCutter(const Chunk& chunk) : ChunkCutter(chunk.header, chunk.payload) {}
  ChunkCutter(const ChunkHeader& header, std::span<const std::byte> payload) : header_(header), payload_(payload) {}
  // Fills the next part. False: the last part was already given.
  bool Next(v1::ChunkPart& part);

 private:
  const ChunkHeader& header_;
  const std::span<const std::byte> payload_;
  size_t offset_ = 0;
  bool started_ = false;
};

// Joins parts and verifies each finished payload against its header. Memory grows with the bytes that arrived, not with
// the size that a header claims.
class ChunkAssembler {
 public:
  // Returns the chunk if `part` was its last one. InvalidArgument: parts out of order, more bytes than announced, a
  // field out of range. DataLoss: the payload does not match its header.
  absl::StatusOr<std::optional<Chunk>> Add(const v1::ChunkPart& part);
  // True while a chunk has begun and not ended.
  bool pending() const { return pending_; }

 private:
  bool pending_ = false;
  Chunk chunk_;
};

}  // namespace spl::chunk
