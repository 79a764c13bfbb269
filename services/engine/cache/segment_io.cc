#include "services/engine/cache/segment_io.h"

#include <algorithm>
#include <map>

#include "kernels/common/kv_rows.h"
#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/quantized_kv.h"

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
  pages.reserve(2 * num_streams);
  for (int32_t s = 0; s < num_streams; ++s) pages.push_back(source.page(s, offset));
  if (in_first < count) {
    for (int32_t s = 0; s < num_streams; ++s) pages.push_back(source.page(s, offset + count - 1));
  }
  const size_t page_bytes = model.page_bytes(), half = page_bytes / 2;
  const auto copy = [&](const std::byte* from, int32_t from_slot, std::byte* to, int32_t to_slot, int32_t tokens) {
    kernels::CopyKvRows(model.kv_dtype(), model.config().head_dim, from, from_slot, to, to_slot, tokens);
  };
  std::vector<std::byte> read(pages.size() * page_bytes);
  if (absl::Status status = source.pool().ReadPages(pages, read.data()); !status.ok()) return status;
  chunk::Chunk chunk;
  chunk.payload.resize(ChunkPayloadBytes(model));
  for (int32_t s = 0; s < num_streams; ++s) {
    for (const size_t part : {size_t{0}, half}) {  // K, then V
      std::byte* const to = chunk.payload.data() + s * page_bytes + part;
      copy(read.data() + s * page_bytes + part, slot, to, 0, in_first);
      if (in_first < count)
        copy(read.data() + (num_streams + s) * page_bytes + part, 0, to, in_first, count - in_first);
    }
  }
  chunk.header = {.key = key,
                  .model_fingerprint = model.kv_fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = static_cast<uint32_t>(count),
                  .first_position = static_cast<uint32_t>(source.begin() + offset),
                  .provenance = source.isolated() ? chunk::Provenance::kCanon : chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size()),
                  .context = source.context().front};
  return chunk;
}

namespace {

KvShape ShapeOf(const Model& model) { return {model.config().num_layers, model.config().num_kv_heads}; }

// Takes the pages of one chunk, [layer][kv_head], for the caller. Empty: there is no room.
std::vector<int32_t> TakeChunkPages(PagePool& pool, const Model& model,
                                    const std::function<bool(int64_t num_pages)>& make_room) {
  const KvShape shape = ShapeOf(model);
  std::vector<int32_t> taken, pages;
  if (!make_room(shape.num_streams()) || !pool.Allocate(shape.num_streams(), taken).ok()) return pages;
  const std::vector<int32_t> order = StreamsByRank(shape, pool.view().num_ranks());
  pages.resize(taken.size());
  for (size_t i = 0; i < taken.size(); ++i) pages[order[i]] = taken[i];
  return pages;
}

// Position and context in which a segment was computed. Its chunks must lie one behind the other in it.
struct SegmentPlace {
  int64_t begin = 0;
  SourceContext context;

  static SegmentPlace OfFirst(const chunk::ChunkHeader& header) {
    return {header.first_position, ContextOfHeader(header)};
  }
  bool Holds(size_t index, const chunk::ChunkHeader& header) const {
    return (header.provenance == chunk::Provenance::kCanon) == context.isolated && header.context == context.front &&
           header.first_position == static_cast<uint64_t>(begin) + index * static_cast<uint64_t>(kChunk);
  }
};

// Chunks on their way into pages of a pool.
class LandingSegment {
 public:
  LandingSegment(PagePool& pool, const Model& model, size_t num_tokens,
                 const std::function<bool(int64_t num_pages)>& make_room)
      : pool_(pool),
        model_(model),
        num_tokens_(num_tokens),
        make_room_(make_room),
        landing_(pool, ChunkPayloadBytes(model)) {}
  ~LandingSegment() {
    for (const auto& [chunk, unfilled] : placed_) pool_.Release(unfilled);
  }

  chunk::Pieces Place(int32_t chunk, const chunk::ChunkHeader& header) {
    if (!IsOfModel(header, model_) || header.provenance < chunk::Provenance::kCanon ||
        header.num_tokens != static_cast<uint32_t>(TokensOfChunk(num_tokens_, chunk)))
      return {};
    std::vector<int32_t>& pages = placed_[chunk];
    if (pages.empty()) pages = TakeChunkPages(pool_, model_, make_room_);
    if (pages.empty()) return {};
    return landing_.PiecesFor(static_cast<size_t>(chunk), pages);
  }
  // Passes the chunk's pages to the caller. Empty: the chunk cannot be used.
  std::vector<int32_t> Take(int32_t chunk, const chunk::ChunkHeader& header, const SegmentPlace& where) {
    const auto index = static_cast<size_t>(chunk);
    if (!where.Holds(index, header) || !landing_.Land(index, placed_.at(chunk)).ok()) return {};
    return placed_.extract(chunk).mapped();
  }

 private:
  PagePool& pool_;
  const Model& model_;
  const size_t num_tokens_;
  const std::function<bool(int64_t num_pages)>& make_room_;
  ChunkLanding landing_;
  std::map<int32_t, std::vector<int32_t>> placed_;  // chunk → pages; some may never be filled
};

// Takes pages of zeros, with one owner each.
std::vector<int32_t> TakeZeros(PagePool& pool, const Model& model,
                               const std::function<bool(int64_t num_pages)>& make_room) {
  std::vector<int32_t> pages = TakeChunkPages(pool, model, make_room);
  const std::vector<std::byte> zeros(pages.size() * model.page_bytes());
  if (!pages.empty() && !pool.WritePages(pages, zeros.data()).ok()) {
    pool.Release(pages);
    pages.clear();
  }
  return pages;
}

}  // namespace

FetchedSegment FetchSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                            std::span<const int32_t> tokens, const Model& model, PagePool& pool,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool(int64_t num_pages)>& make_room) {
  LandingSegment landing(pool, model, tokens.size(), make_room);
  FetchedSegment fetched;
  std::vector<std::vector<int32_t>> pages(ShapeOf(model).num_streams());
  size_t num_tokens = 0;
  SegmentPlace where;
  const auto take = [&](size_t index, const chunk::ChunkHeader& header) {
    if (index == 0) where = SegmentPlace::OfFirst(header);
    const std::vector<int32_t> filled = landing.Take(static_cast<int32_t>(index), header, where);
    if (filled.empty()) return false;
    for (size_t s = 0; s < pages.size(); ++s) pages[s].push_back(filled[s]);
    num_tokens += header.num_tokens;
    fetched.num_bytes += static_cast<int64_t>(header.payload_bytes);
    return true;
  };
  // A store that fails costs time, never a request.
  (void)store.FetchLeading(
      keys, deadline,
      [&](size_t index, const chunk::ChunkHeader& header) {
        return landing.Place(static_cast<int32_t>(index), header);
      },
      take);
  if (num_tokens > 0)
    fetched.source = std::make_shared<SegmentSource>(pool, std::move(pages), static_cast<int32_t>(where.begin),
                                                     tokens.first(num_tokens), where.context);
  return fetched;
}

FetchedSegment FetchSegmentChunks(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                  std::span<const int32_t> chunks, std::span<const int32_t> tokens, int32_t begin,
                                  const SourceContext& context, const Model& model, PagePool& pool,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::function<bool(int64_t num_pages)>& make_room) {
  FetchedSegment fetched;
  const std::vector<int32_t> zeros = TakeZeros(pool, model, make_room);
  if (zeros.empty()) return fetched;
  std::vector<std::vector<int32_t>> pages(zeros.size());  // [stream][chunk]
  for (size_t s = 0; s < pages.size(); ++s) pages[s].assign(keys.size(), zeros[s]);
  std::vector<chunk::ChunkKey> wanted;
  for (const int32_t chunk : chunks) wanted.push_back(keys[chunk]);
  LandingSegment landing(pool, model, tokens.size(), make_room);
  std::vector<int32_t> taken;
  size_t num_taken = 0;
  const auto take = [&](size_t index, const chunk::ChunkHeader& header) {
    const std::vector<int32_t> filled = landing.Take(chunks[index], header, {begin, context});
    if (filled.empty()) return false;
    for (size_t s = 0; s < pages.size(); ++s) pages[s][chunks[index]] = filled[s];
    taken.insert(taken.end(), filled.begin(), filled.end());
    fetched.num_bytes += static_cast<int64_t>(header.payload_bytes);
    ++num_taken;
    return true;
  };
  (void)store.FetchLeading(
      wanted, deadline,
      [&](size_t index, const chunk::ChunkHeader& header) { return landing.Place(chunks[index], header); }, take);
  if (num_taken == chunks.size()) {
    // The pages of zeros get one owner for each chunk that they stand for.
    for (size_t chunk = 0; chunk < keys.size(); ++chunk) {
      if (std::find(chunks.begin(), chunks.end(), static_cast<int32_t>(chunk)) == chunks.end()) pool.Share(zeros);
    }
    fetched.source =
        std::make_shared<SegmentSource>(pool, std::move(pages), begin, tokens, context, chunks.size() == keys.size());
  } else {
    pool.Release(taken);
  }
  pool.Release(zeros);
  return fetched;
}

chunk::ChunkKey QuantizedKeyOf(const chunk::ChunkKey& chunk_key, const chunk::Digest& model_fingerprint,
                               const chunk::Digest& namespace_key, int32_t first_layer) {
  const int32_t meaning[] = {kQuantizedVersion, first_layer};
  return chunk::MakeChunkKey(chunk::ChainKind::kQuantized, model_fingerprint, namespace_key, &chunk_key, meaning);
}

chunk::Chunk QuantizeChunk(const chunk::Chunk& chunk, int32_t first_layer, const Model& model) {
  const ModelConfig& config = model.config();
  const size_t page_bytes = model.page_bytes(), to_bytes = QuantizedPageBytes(config.head_dim);
  SPLICE_CHECK(chunk.payload.size() == ChunkPayloadBytes(model), "a chunk of this model");
  chunk::Chunk quantized;
  quantized.payload.resize(QuantizedChunkBytes(config, first_layer));
  std::byte* to = quantized.payload.data();
  const size_t first = static_cast<size_t>(first_layer) * static_cast<size_t>(config.num_kv_heads);
  for (size_t at = first * page_bytes; at < chunk.payload.size(); at += page_bytes, to += to_bytes)
    QuantizePage(std::span(chunk.payload).subspan(at, page_bytes), model.kv_dtype(), config.head_dim, to);
  quantized.header = chunk.header;
  quantized.header.key =
      QuantizedKeyOf(chunk.header.key, chunk.header.model_fingerprint, chunk.header.namespace_id, first_layer);
  quantized.header.payload_bytes = quantized.payload.size();
  quantized.header.payload_crc32c = kernels::Crc32cExtend(0, quantized.payload.data(), quantized.payload.size());
  quantized.header.recompute_seconds *=
      static_cast<float>(quantized.payload.size()) / static_cast<float>(chunk.payload.size());
  return quantized;
}

namespace {

// Writes into the pages of streams from `first_stream` on.
absl::Status DequantizeChunk(std::span<const std::byte> payload, std::span<const int32_t> pages, size_t first_stream,
                             const Model& model, PagePool& pool, std::vector<std::byte>& staged) {
  const int32_t head_dim = model.config().head_dim;
  const size_t page_bytes = model.page_bytes(), from_bytes = QuantizedPageBytes(head_dim);
  const bool on_host = pool.host_memory();
  if (!on_host) staged.resize((pages.size() - first_stream) * page_bytes);
  for (size_t s = first_stream; s < pages.size(); ++s) {
    const size_t i = s - first_stream;
    DequantizePage(payload.subspan(i * from_bytes, from_bytes), model.kv_dtype(), head_dim,
                   on_host ? pool.view().k(pages[s]) : staged.data() + i * page_bytes);
  }
  return on_host ? absl::OkStatus() : pool.WritePages(pages.subspan(first_stream), staged.data());
}

}  // namespace

FetchedSegment FetchQuantizedSegment(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys,
                                     std::span<const int32_t> tokens, const chunk::Digest& namespace_key,
                                     int32_t first_layer, const Model& model, PagePool& pool,
                                     std::chrono::steady_clock::time_point deadline,
                                     const std::function<bool(int64_t num_pages)>& make_room) {
  FetchedSegment fetched;
  const size_t bytes = QuantizedChunkBytes(model.config(), first_layer);
  std::vector<chunk::ChunkKey> wanted;
  for (const chunk::ChunkKey& key : keys)
    wanted.push_back(QuantizedKeyOf(key, model.kv_fingerprint(), namespace_key, first_layer));
  std::vector<std::vector<std::byte>> landed(keys.size());
  const auto place = [&](size_t index, const chunk::ChunkHeader& header) -> chunk::Pieces {
    if (header.model_fingerprint != model.kv_fingerprint() || header.layout_digest != model.layout_digest() ||
        header.payload_bytes != bytes || header.provenance < chunk::Provenance::kCanon ||
        header.num_tokens != static_cast<uint32_t>(TokensOfChunk(tokens.size(), static_cast<int32_t>(index))))
      return {};
    landed[index].resize(bytes);
    return {landed[index]};
  };
  const size_t first_stream = static_cast<size_t>(first_layer) * static_cast<size_t>(model.config().num_kv_heads);
  std::vector<std::vector<int32_t>> pages(ShapeOf(model).num_streams());  // [stream][chunk]
  std::vector<int32_t> taken;
  std::vector<std::byte> staged;
  SegmentPlace where;
  size_t num_taken = 0;
  const auto take = [&](size_t index, const chunk::ChunkHeader& header) {
    if (index == 0) where = SegmentPlace::OfFirst(header);
    if (!where.Holds(index, header)) return false;
    const std::vector<int32_t> filled = TakeChunkPages(pool, model, make_room);
    if (filled.empty()) return false;
    taken.insert(taken.end(), filled.begin(), filled.end());
    for (size_t s = 0; s < pages.size(); ++s) pages[s].push_back(filled[s]);
    if (!DequantizeChunk(landed[index], filled, first_stream, model, pool, staged).ok()) return false;
    landed[index] = {};
    fetched.num_bytes += static_cast<int64_t>(bytes);
    ++num_taken;
    return true;
  };
  (void)store.FetchLeading(wanted, deadline, place, take);
  if (num_taken == keys.size()) {
    fetched.source = std::make_shared<SegmentSource>(pool, std::move(pages), static_cast<int32_t>(where.begin), tokens,
                                                     where.context, /*whole=*/false);
  } else {
    pool.Release(taken);
  }
  return fetched;
}

}  // namespace spl::engine
