#include "services/engine/cache/segment_io.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "kernels/kv_copy/crc32c.h"
#include "services/engine/cache/chunk_io.h"

namespace spl::engine {
namespace {

constexpr int32_t kChunk = chunk::kChunkTokens;

int32_t TokensOfChunk(size_t num_tokens, int32_t index) {
  return std::min(kChunk, static_cast<int32_t>(num_tokens) - index * kChunk);
}

}  // namespace

absl::StatusOr<chunk::Chunk> PackSegmentChunk(const SegmentSource& source, int32_t index, const chunk::ChunkKey& key,
                                              const Model& model) {
  const int32_t offset = index * kChunk, count = TokensOfChunk(source.tokens().size(), index);
  const int32_t slot = source.slot(offset), in_first = std::min(count, kernels::kPageTokens - slot);
  const int32_t num_streams = source.num_streams();
  std::vector<int32_t> pages;
  for (int32_t s = 0; s < num_streams; ++s) pages.push_back(source.page(s, offset));
  if (in_first < count) {
    for (int32_t s = 0; s < num_streams; ++s) pages.push_back(source.page(s, offset + count - 1));
  }
  const size_t page_bytes = model.page_bytes(), half = page_bytes / 2, row = half / kernels::kPageTokens;
  std::vector<std::byte> read(pages.size() * page_bytes);
  if (absl::Status status = source.pool().ReadPages(pages, read.data()); !status.ok()) return status;
  chunk::Chunk chunk;
  chunk.payload.resize(ChunkPayloadBytes(model));
  for (int32_t s = 0; s < num_streams; ++s) {
    for (const size_t part : {size_t{0}, half}) {  // K, then V
      std::byte* const to = chunk.payload.data() + s * page_bytes + part;
      std::memcpy(to, read.data() + s * page_bytes + part + slot * row, in_first * row);
      if (in_first < count)
        std::memcpy(to + in_first * row, read.data() + (num_streams + s) * page_bytes + part, (count - in_first) * row);
    }
  }
  chunk.header = {.key = key,
                  .model_fingerprint = model.fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = static_cast<uint32_t>(count),
                  .first_position = static_cast<uint32_t>(source.begin() + offset),
                  .provenance = source.isolated() ? chunk::Provenance::kCanon : chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size())};
  return chunk;
}

FetchedSegment FetchSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                            std::span<const int32_t> tokens, const Model& model, PagePool& pool,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool(int64_t num_pages)>& make_room) {
  const int32_t num_streams = model.config().num_layers * model.config().num_kv_heads;
  std::map<size_t, std::vector<int32_t>> placed;  // pages by chunk; perhaps not all will be filled
  const std::vector<int32_t> order =
      StreamsByRank({model.config().num_layers, model.config().num_kv_heads}, pool.view().num_ranks());
  ChunkLanding landing(pool, ChunkPayloadBytes(model));
  const auto place = [&](size_t index, const chunk::ChunkHeader& header) -> chunk::Pieces {
    if (!IsOfModel(header, model) || header.provenance < chunk::Provenance::kCanon ||
        header.num_tokens != static_cast<uint32_t>(TokensOfChunk(tokens.size(), static_cast<int32_t>(index))))
      return {};
    std::vector<int32_t>& pages = placed[index];  // [layer][kv_head]
    if (pages.empty()) {
      std::vector<int32_t> taken;
      if (!make_room(num_streams) || !pool.Allocate(num_streams, taken).ok()) return {};
      pages.resize(taken.size());
      for (size_t i = 0; i < taken.size(); ++i) pages[static_cast<size_t>(order[i])] = taken[i];
    }
    return landing.PiecesFor(index, pages);
  };
  FetchedSegment fetched;
  std::vector<std::vector<int32_t>> pages(static_cast<size_t>(num_streams));
  size_t num_tokens = 0;
  int64_t begin = 0;
  bool isolated = false;
  const auto take = [&](size_t index, const chunk::ChunkHeader& header) {
    if (index == 0) {
      begin = header.first_position;
      isolated = header.provenance == chunk::Provenance::kCanon;
    }
    // All of one context, one behind the other.
    if ((header.provenance == chunk::Provenance::kCanon) != isolated ||
        header.first_position != static_cast<uint64_t>(begin) + index * kChunk ||
        !landing.Land(index, placed.at(index)).ok())
      return false;
    const auto filled = placed.extract(index);
    for (int32_t s = 0; s < num_streams; ++s) pages[s].push_back(filled.mapped()[static_cast<size_t>(s)]);
    num_tokens += header.num_tokens;
    fetched.num_bytes += static_cast<int64_t>(header.payload_bytes);
    return true;
  };
  (void)store.FetchLeading(keys, deadline, place, take);  // a store that fails costs time, never a request
  for (const auto& [index, unfilled] : placed) pool.Release(unfilled);
  if (num_tokens > 0)
    fetched.source = std::make_shared<SegmentSource>(pool, std::move(pages), static_cast<int32_t>(begin),
                                                     tokens.first(num_tokens), isolated);
  return fetched;
}

}  // namespace spl::engine
