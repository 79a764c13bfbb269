// Identity and integrity of stored KV: keys, the header that travels with every payload, and the storage interface.
// docs/data-formats.md describes the bytes.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::chunk {

inline constexpr int kChunkTokens = 64;

using Digest = std::array<uint8_t, 32>;
Digest Sha256(std::string_view bytes);

// SHA-256 of (model fingerprint, namespace key, previous chunk's key, tokens). Content addressed and salted: without
// the namespace key a chunk can neither be found nor named.
struct ChunkKey {
  Digest bytes{};
  bool operator==(const ChunkKey&) const = default;
  std::string ToHex() const;
};

struct ChunkKeyHash {
  size_t operator()(const ChunkKey& key) const;  // the first 8 bytes
};

// Labels of a chunk's KV by what it was computed from (docs/methods/provenance.md); larger is purer.
enum class Provenance : uint8_t { kApprox = 0, kCanon = 2, kExact = 3 };

// Domain separates kinds of chain: the exact prefix chain (from the start of the prompt) and, later, segment chains.
// A summary is no chain of its own but one entry behind the last chunk of a segment's; quantized KV is one beside each.
enum class ChainKind : uint8_t { kExactPrefix = 1, kSegment = 2, kSummary = 4, kQuantized = 5 };

// The key of one chunk of a chain. `previous` is null for the first. num tokens: 1 to 64; all but a chain's last
// are 64.
ChunkKey MakeChunkKey(ChainKind kind, const Digest& model_fingerprint, const Digest& namespace_key,
                      const ChunkKey* previous, std::span<const int32_t> tokens);

// Keys of the full 64-token chunks of a prompt, in order.
std::vector<ChunkKey> MakePrefixKeys(const Digest& model_fingerprint, const Digest& namespace_key,
                                     std::span<const int32_t> tokens);

// Of whoever names no namespace: always there, without a quota.
inline constexpr Digest kDefaultNamespace{};

struct ChunkHeader {
  ChunkKey key;
  Digest model_fingerprint{};
  Digest layout_digest{};  // of the page layout: a reader with another layout must not map the payload
  uint32_t num_tokens = 0;
  uint32_t first_position = 0;
  Provenance provenance = Provenance::kApprox;
  uint64_t payload_bytes = 0;
  uint32_t payload_crc32c = 0;
  // The namespace key that went into the chunk's key. The store accounts and deletes by it and knows nothing else of
  // it.
  Digest namespace_id = kDefaultNamespace;
  // What it cost to compute the chunk: eviction weighs it against the bytes. 0: unknown, the store estimates it.
  float recompute_seconds = 0;
};

// Fixed-size little-endian form with magic, version and its own checksum, as it stands in slab files.
inline constexpr size_t kEncodedHeaderBytes = 192;
std::array<std::byte, kEncodedHeaderBytes> EncodeHeader(const ChunkHeader& header);
// DataLoss: magic, version, checksum, or a field out of range.
absl::StatusOr<ChunkHeader> DecodeHeader(std::span<const std::byte> bytes);

struct Chunk {
  ChunkHeader header;
  std::vector<std::byte> payload;
};
std::vector<const Chunk*> PointersTo(std::span<const Chunk> chunks);

// How eviction treats a chunk. Soft: after all others. Hard: never; its bytes are unavailable to anything else.
enum class Pin : uint8_t { kNone = 0, kSoft = 1, kHard = 2 };

struct PutOptions {
  // Acknowledge only what is on disk (synced). Otherwise the store may still lose the chunk when it is killed.
  bool durable = false;
  // NotFound when the chunk's namespace was never created, instead of an implicit one without a quota.
  bool require_namespace = false;
  Pin pin = Pin::kNone;
};

struct PutReport {
  size_t num_stored = 0;
  size_t num_existing = 0;
  size_t num_durable = 0;  // of both: known to be on disk when the answer was given
};

// Where the bytes of one payload go: pieces of the caller's memory, in the payload's order.
using Pieces = std::vector<std::span<std::byte>>;
// Sizes must match. Cost: one copy.
void CopyToPieces(std::span<const std::byte> payload, const Pieces& pieces);

// Where chunks are kept: in memory, on disk, or behind a splice-kvstore. Implementations are safe for concurrent use.
class ChunkStore {
 public:
  virtual ~ChunkStore() = default;

  // How many of `keys`, from the first on, are stored without a gap.
  virtual absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys,
                                              std::chrono::steady_clock::time_point deadline) = 0;

  // Calls sink for each of the leading stored chunks, in order, until it returns false, a key is missing, or the
  // deadline passes. Every payload has been verified against its header. Returns how many sink accepted. A corrupt
  // chunk is dropped from the store and counts as missing.
  virtual absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys,
                                            std::chrono::steady_clock::time_point deadline,
                                            const std::function<bool(Chunk&&)>& sink) = 0;

  // Stores what is not stored yet. ResourceExhausted when there is no room for it, or none under a quota.
  virtual absl::Status Put(std::span<const Chunk> chunks, std::chrono::steady_clock::time_point deadline) = 0;

  // GetLeading into memory of the caller, without a copy in between where the store can. `place` answers where the
  // payload of keys[index] goes: sizes that add up to payload_bytes, or no pieces to stop before it. It is asked one
  // chunk at a time, but ahead of the others, in any order, from any thread, beyond the first missing key, and again
  // for the same chunk after a failure. `sink` is called in the order of the keys when the bytes stand there and are
  // verified, and ends the call by returning false. Until its sink a chunk's pieces hold anything; nothing is written
  // to them after the call has returned.
  using PlaceFn = std::function<Pieces(size_t index, const ChunkHeader& header)>;
  using FetchedFn = std::function<bool(size_t index, const ChunkHeader& header)>;
  virtual absl::StatusOr<size_t> FetchLeading(std::span<const ChunkKey> keys,
                                              std::chrono::steady_clock::time_point deadline, const PlaceFn& place,
                                              const FetchedFn& sink);

  // Put that says what it did. Borrows the chunks. Unimplemented: a store that cannot do what the options ask for.
  virtual absl::StatusOr<PutReport> PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                            std::chrono::steady_clock::time_point deadline);
};

}  // namespace spl::chunk
