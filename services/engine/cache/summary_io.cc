#include "services/engine/cache/summary_io.h"

#include <bit>
#include <cstring>
#include <utility>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"

namespace spl::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian, as KV is");

// Number of 4-byte values in each part of a summary.
struct Sizes {
  size_t tile_means, local_query, attended;
  size_t all() const { return tile_means + local_query + attended; }
};

Sizes SizesOf(size_t num_tokens, const ModelConfig& config) {
  const auto layers = static_cast<size_t>(config.num_layers), d = static_cast<size_t>(config.head_dim);
  const auto tiles = static_cast<size_t>(PagesFor(static_cast<int64_t>(num_tokens)));
  return {layers * tiles * static_cast<size_t>(config.num_kv_heads) * d,
          layers * static_cast<size_t>(config.num_qo_heads) * d,
          static_cast<size_t>(NumAttended(MiddleTilesOf({0, static_cast<int32_t>(num_tokens)}).size()))};
}

// A header can say at most 64 tokens, so it says those of the last tile.
uint32_t LastTileTokens(size_t num_tokens) { return static_cast<uint32_t>((num_tokens - 1) % chunk::kChunkTokens + 1); }

template <typename T>
void Append(std::span<const T> values, std::byte*& to) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
  to += values.size_bytes();
}

template <typename T>
std::vector<T> Take(size_t count, const std::byte*& from) {
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), from, count * sizeof(T));
  from += count * sizeof(T);
  return values;
}

// True if these are ascending offsets of middle tokens.
bool AreAttended(std::span<const int32_t> offsets, size_t num_tokens) {
  const PositionRange middle = MiddleTilesOf({0, static_cast<int32_t>(num_tokens)});
  int32_t next = middle.begin;
  for (const int32_t offset : offsets) {
    if (offset < next || offset >= middle.end) return false;
    next = offset + 1;
  }
  return true;
}

}  // namespace

chunk::ChunkKey SummaryKeyOf(std::span<const chunk::ChunkKey> segment_keys, const chunk::Digest& model_fingerprint,
                             const chunk::Digest& namespace_key) {
  SPLICE_CHECK(!segment_keys.empty(), "a segment has chunks");
  const int32_t version = kSummaryVersion;
  return chunk::MakeChunkKey(chunk::ChainKind::kSummary, model_fingerprint, namespace_key, &segment_keys.back(),
                             {&version, 1});
}

chunk::Chunk PackSummary(const SegmentSource& source, const SegmentSummary& summary, const chunk::ChunkKey& key,
                         const Model& model) {
  const size_t num_tokens = source.tokens().size();
  const Sizes sizes = SizesOf(num_tokens, model.config());
  const bool whole = !summary.local_query.empty();
  SPLICE_CHECK(summary.tile_means.size() == sizes.tile_means, "a summary of the whole source");
  SPLICE_CHECK(!whole || summary.local_query.size() == sizes.local_query, "one query a layer");
  SPLICE_CHECK(summary.attended.size() == (whole ? sizes.attended : 0), "attended tokens beside the local query");
  chunk::Chunk chunk;
  chunk.payload.resize((whole ? sizes.all() : sizes.tile_means) * sizeof(float));
  std::byte* to = chunk.payload.data();
  Append<float>(summary.tile_means, to);
  Append<float>(summary.local_query, to);
  Append<int32_t>(summary.attended, to);
  chunk.header = {.key = key,
                  .model_fingerprint = model.kv_fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = LastTileTokens(num_tokens),
                  .first_position = static_cast<uint32_t>(source.begin()),
                  .provenance = source.isolated() ? chunk::Provenance::kCanon : chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size()),
                  .context = source.context().front};
  return chunk;
}

std::optional<FetchedSummary> FetchSummary(chunk::ChunkStore& store, const chunk::ChunkKey& key, size_t num_tokens,
                                           const Model& model, std::chrono::steady_clock::time_point deadline) {
  const Sizes sizes = SizesOf(num_tokens, model.config());
  std::optional<FetchedSummary> fetched;
  const auto take = [&](chunk::Chunk&& chunk) {
    const chunk::ChunkHeader& header = chunk.header;
    const bool whole = chunk.payload.size() == sizes.all() * sizeof(float);
    if (header.model_fingerprint != model.kv_fingerprint() || header.layout_digest != model.layout_digest() ||
        header.provenance < chunk::Provenance::kCanon || header.num_tokens != LastTileTokens(num_tokens) ||
        (!whole && chunk.payload.size() != sizes.tile_means * sizeof(float)))
      return false;
    const std::byte* from = chunk.payload.data();
    SegmentSummary summary;
    summary.tile_means = Take<float>(sizes.tile_means, from);
    if (whole) {
      summary.local_query = Take<float>(sizes.local_query, from);
      summary.attended = Take<int32_t>(sizes.attended, from);
    }
    if (!AreAttended(summary.attended, num_tokens)) return false;
    fetched = {.summary = std::move(summary),
               .begin = static_cast<int32_t>(header.first_position),
               .context = ContextOfHeader(header),
               .num_bytes = static_cast<int64_t>(chunk.payload.size())};
    return true;
  };
  (void)store.GetLeading({&key, 1}, deadline, take);
  return fetched;
}

}  // namespace spl::engine
