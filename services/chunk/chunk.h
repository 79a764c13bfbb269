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

// How a chunk's KV was computed (docs/methods/provenance.md); a larger value is purer.
enum class Provenance : uint8_t { kApprox = 0, kCanon = 2, kExact = 3 };

// Kinds of key chains: the exact prefix chain (from the start of the prompt) and segment chains. A summary is not a
// chain but one entry after the last chunk of a segment's chain; quantized KV has one entry beside each chunk.
enum class ChainKind : uint8_t { kExactPrefix = 1, kSegment = 2, kSummary = 4, kQuantized = 5 };

// Makes the key of one chunk of a chain. `previous` is the key before it; null: first chunk. `tokens` has 1 to 64
// entries; all chunks but a chain's last have 64.
ChunkKey MakeChunkKey(ChainKind kind, const Digest& model_fingerprint, const Digest& namespace_key,
                      const ChunkKey* previous, std::span<const int32_t> tokens);

// Keys of the full 64-token chunks of a prompt, in order.
std::vector<ChunkKey> MakePrefixKeys(const Digest& model_fingerprint, const Digest& namespace_key,
                                     std::span<const int32_t> tokens);

// Namespace of requests that name none: it always exists and has no quota.
inline constexpr Digest kDefaultNamespace{};

// Identifies the text that a segment's KV was computed behind, without the first `lead` tokens of that text. Salted
// with the segment's namespace key: who does not have it cannot test a guess of the text.
struct ContextHash {
  std::array<uint8_t, 12> digest{};
  uint32_t lead = 0;
  bool known() const { return digest != std::array<uint8_t, 12>{}; }  // false: nobody knows the text
  bool operator==(const ContextHash&) const = default;
};
// `text`: the tokens in front of the segment, all of them. REQUIRES: lead <= text.size(). Cost: one pass over them.
ContextHash MakeContextHash(const Digest& namespace_key, std::span<const int32_t> text, uint32_t lead);

struct ChunkHeader {
  ChunkKey key;
  Digest model_fingerprint{};
  Digest layout_digest{};  // digest of the page layout: a reader with another layout must not map the payload
  uint32_t num_tokens = 0;
  uint32_t first_position = 0;
  Provenance provenance = Provenance::kApprox;
  uint64_t payload_bytes = 0;
  uint32_t payload_crc32c = 0;
  // The namespace key that went into the chunk's key. The store accounts and deletes by it, and uses it for nothing
  // else.
  Digest namespace_id = kDefaultNamespace;
  // Seconds that computing the chunk took; eviction weighs them against the bytes. 0: unknown, the store estimates it.
  float recompute_seconds = 0;
  // Only for chunks of segments, summaries and quantized copies: the text in front of the segment's first token.
  ContextHash context;
};

// Fixed-size little-endian form with magic, version and its own checksum, as stored in slab files.
inline constexpr size_t kEncodedHeaderBytes = 192;
std::array<std::byte, kEncodedHeaderBytes> EncodeHeader(const ChunkHeader& header);
// DataLoss: magic, version, checksum, or a field out of range.
absl::StatusOr<ChunkHeader> DecodeHeader(std::span<const std::byte> bytes);

struct Chunk {
  ChunkHeader header;
  std::vector<std::byte> payload;
};
std::vector<const Chunk*> PointersTo(std::span<const Chunk> chunks);

// How eviction treats a chunk. Soft: evicted after all others. Hard: never evicted; its bytes are unavailable to
// anything else.
enum class Pin : uint8_t { kNone = 0, kSoft = 1, kHard = 2 };

struct PutOptions {
  // Acknowledge only after the chunk is on disk (synced). Otherwise the store may lose the chunk when it is killed.
  bool durable = false;
  // NotFound if the chunk's namespace was never created. Otherwise an implicit one without a quota is made.
  bool require_namespace = false;
  Pin pin = Pin::kNone;
};

struct PutReport {
  size_t num_stored = 0;
  size_t num_existing = 0;
  size_t num_durable = 0;  // stored and existing chunks that are known to be on disk when the answer is given
};

// Destination of one payload: pieces of the caller's memory, in the payload's order.
using Pieces = std::vector<std::span<std::byte>>;
// Sizes must match. Cost: one copy.
void CopyToPieces(std::span<const std::byte> payload, const Pieces& pieces);

// A place that keeps chunks: memory, disk, or a splice-kvstore process. Implementations are safe for concurrent use.
class ChunkStore {
 public:
  virtual ~ChunkStore() = default;

  // Returns how many of `keys`, counted from the first, are stored without a gap.
  virtual absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys,
                                              std::chrono::steady_clock::time_point deadline) = 0;

  // Calls sink for each of the leading stored chunks, in order, until sink returns false, a key is missing, or the
  // deadline passes. Every payload has been verified against its header. Returns how many chunks sink accepted. A
  // corrupt chunk is dropped from the store and counts as missing.
  virtual absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys,
                                            std::chrono::steady_clock::time_point deadline,
                                            const std::function<bool(Chunk&&)>& sink) = 0;

  // Stores the chunks that are not stored yet. ResourceExhausted: no room for them, or none under a quota.
  virtual absl::Status Put(std::span<const Chunk> chunks, std::chrono::steady_clock::time_point deadline) = 0;

  // GetLeading into memory of the caller, without an intermediate copy if the store can do that.
  //
  // `place` returns the destination of the payload of keys[index]: pieces whose sizes add up to payload_bytes, or no
  // pieces to stop before that chunk. It is called for one chunk at a time, but before earlier chunks have arrived, in
  // any order, from any thread, beyond the first missing key, and again for the same chunk after a failure.
  //
  // `sink` is called in the order of the keys, once the bytes are in place and verified; it ends the call by returning
  // false. The contents of a chunk's pieces are undefined until its sink call. Nothing is written to them after this
  // call has returned.
  using PlaceFn = std::function<Pieces(size_t index, const ChunkHeader& header)>;
  using FetchedFn = std::function<bool(size_t index, const ChunkHeader& header)>;
  virtual absl::StatusOr<size_t> FetchLeading(std::span<const ChunkKey> keys,
                                              std::chrono::steady_clock::time_point deadline, const PlaceFn& place,
                                              const FetchedFn& sink);

  // Put with options and a report. Borrows the chunks. Unimplemented: the store cannot do what the options ask for.
  virtual absl::StatusOr<PutReport> PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                            std::chrono::steady_clock::time_point deadline);
};

}  // namespace spl::chunk
