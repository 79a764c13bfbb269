#include "services/engine/cache/summary_io.h"

#include <bit>
#include <cstring>
#include <utility>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"

namespace spl::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian, as KV is");

// Floats of a summary's two parts.
struct Sizes {
  size_t tile_means, local_query;
};

Sizes SizesOf(size_t num_tokens, const ModelConfig& config) {
  const auto layers = static_cast<size_t>(config.num_layers), d = static_cast<size_t>(config.head_dim);
  const auto tiles = static_cast<size_t>(PagesFor(static_cast<int64_t>(num_tokens)));
  return {layers * tiles * static_cast<size_t>(config.num_kv_heads) * d,
          layers * static_cast<size_t>(config.num_qo_heads) * d};
}

// A header says at most 64 tokens: those of the last tile.
uint32_t LastTileTokens(size_t num_tokens) { return static_cast<uint32_t>((num_tokens - 1) % chunk::kChunkTokens + 1); }

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
  SPLICE_CHECK(summary.tile_means.size() == sizes.tile_means, "a summary of the whole source");
  SPLICE_CHECK(summary.local_query.empty() || summary.local_query.size() == sizes.local_query, "one query a layer");
  const size_t bytes = summary.tile_means.size() * sizeof(float), more = summary.local_query.size() * sizeof(float);
  chunk::Chunk chunk;
  chunk.payload.resize(bytes + more);
  std::memcpy(chunk.payload.data(), summary.tile_means.data(), bytes);
  if (more > 0) std::memcpy(chunk.payload.data() + bytes, summary.local_query.data(), more);
  chunk.header = {.key = key,
                  .model_fingerprint = model.fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = LastTileTokens(num_tokens),
                  .first_position = static_cast<uint32_t>(source.begin()),
                  .provenance = source.isolated() ? chunk::Provenance::kCanon : chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size())};
  return chunk;
}

std::optional<FetchedSummary> FetchSummary(chunk::ChunkStore& store, const chunk::ChunkKey& key, size_t num_tokens,
                                           const Model& model, std::chrono::steady_clock::time_point deadline) {
  const Sizes sizes = SizesOf(num_tokens, model.config());
  std::optional<FetchedSummary> fetched;
  const auto take = [&](chunk::Chunk&& chunk) {
    const chunk::ChunkHeader& header = chunk.header;
    const size_t floats = chunk.payload.size() / sizeof(float);
    if (header.model_fingerprint != model.fingerprint() || header.layout_digest != model.layout_digest() ||
        header.provenance < chunk::Provenance::kCanon || header.num_tokens != LastTileTokens(num_tokens) ||
        chunk.payload.size() % sizeof(float) != 0 ||
        (floats != sizes.tile_means && floats != sizes.tile_means + sizes.local_query))
      return false;
    fetched.emplace();
    fetched->begin = static_cast<int32_t>(header.first_position);
    fetched->isolated = header.provenance == chunk::Provenance::kCanon;
    fetched->num_bytes = static_cast<int64_t>(chunk.payload.size());
    fetched->summary.tile_means.resize(sizes.tile_means);
    fetched->summary.local_query.resize(floats - sizes.tile_means);
    const size_t bytes = sizes.tile_means * sizeof(float);
    std::memcpy(fetched->summary.tile_means.data(), chunk.payload.data(), bytes);
    if (floats > sizes.tile_means)
      std::memcpy(fetched->summary.local_query.data(), chunk.payload.data() + bytes, chunk.payload.size() - bytes);
    return true;
  };
  (void)store.GetLeading({&key, 1}, deadline, take);
  return fetched;
}

}  // namespace spl::engine
