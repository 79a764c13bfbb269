#include "services/engine/cache/chunk_io.h"

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

absl::StatusOr<chunk::Chunk> PackChunk(const SequenceKv& kv, int32_t page_idx, const chunk::ChunkKey& key,
                                       const Model& model) {
  SPLICE_CHECK(kv.is_whole(), "a view is not published");
  SPLICE_CHECK((page_idx + 1) * kernels::kPageTokens <= kv.exact_tokens(), "only full pages of exact KV are published");
  chunk::Chunk chunk;
  chunk.payload.resize(ChunkPayloadBytes(model));
  SPLICE_RETURN_IF_ERROR(kv.pool().ReadPages(kv.PagesOfChunk(page_idx), chunk.payload.data()));
  chunk.header = {.key = key,
                  .model_fingerprint = model.kv_fingerprint(),
                  .layout_digest = model.layout_digest(),
                  .num_tokens = kernels::kPageTokens,
                  .first_position = static_cast<uint32_t>(page_idx * kernels::kPageTokens),
                  .provenance = chunk::Provenance::kExact,
                  .payload_bytes = chunk.payload.size(),
                  .payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size())};
  return chunk;
}

bool IsOfModel(const chunk::ChunkHeader& header, const Model& model) {
  return header.model_fingerprint == model.kv_fingerprint() && header.layout_digest == model.layout_digest() &&
         header.payload_bytes == ChunkPayloadBytes(model);
}

chunk::Pieces ChunkLanding::PiecesFor(size_t index, std::span<const int32_t> pages) {
  chunk::Pieces pieces;
  if (pool_.host_memory()) {
    const size_t page_bytes = pool_.view().page_bytes();
    for (const int32_t page : pages) {
      std::byte* const at = pool_.view().k(page);
      if (!pieces.empty() && pieces.back().data() + pieces.back().size() == at) {
        pieces.back() = {pieces.back().data(), pieces.back().size() + page_bytes};
      } else {
        pieces.emplace_back(at, page_bytes);
      }
    }
    return pieces;
  }
  std::vector<std::byte>& staged = staged_[index];
  if (staged.empty() && !spare_.empty()) {
    staged = std::move(spare_.back());
    spare_.pop_back();
  }
  staged.resize(payload_bytes_);
  return {staged};
}

absl::Status ChunkLanding::Land(size_t index, std::span<const int32_t> pages) {
  if (pool_.host_memory()) return absl::OkStatus();
  const auto staged = staged_.find(index);
  SPLICE_CHECK(staged != staged_.end(), "a chunk lands where it was placed");
  const absl::Status status = pool_.WritePages(pages, staged->second.data());
  spare_.push_back(std::move(staged->second));
  staged_.erase(staged);
  return status;
}

FetchedPrefix FetchPrefix(chunk::ChunkStore& store, std::span<const chunk::ChunkKey> keys, int32_t first_page,
                          const Model& model, SequenceKv& kv, std::chrono::steady_clock::time_point deadline,
                          const std::function<bool()>& stop) {
  SPLICE_CHECK(kv.is_whole(), "chunks land in sequences that keep everything");
  SPLICE_CHECK(first_page * int64_t{kernels::kPageTokens} >= kv.num_tokens(), "written pages stay as they are");
  FetchedPrefix fetched;
  ChunkLanding landing(kv.pool(), ChunkPayloadBytes(model));
  const auto page_of = [&](size_t index) { return first_page + static_cast<int32_t>(index); };
  const auto place = [&](size_t index, const chunk::ChunkHeader& header) -> chunk::Pieces {
    if (stop() || !IsOfModel(header, model) || header.provenance != chunk::Provenance::kExact ||
        header.num_tokens != kernels::kPageTokens ||
        header.first_position != static_cast<uint32_t>(page_of(index) * kernels::kPageTokens))
      return {};
    return landing.PiecesFor(index, kv.PagesOfChunk(page_of(index)));
  };
  const auto take = [&](size_t index, const chunk::ChunkHeader& header) {
    if (stop() || !landing.Land(index, kv.PagesOfChunk(page_of(index))).ok()) return false;
    ++fetched.num_chunks;
    fetched.num_bytes += static_cast<int64_t>(header.payload_bytes);
    return true;
  };
  (void)store.FetchLeading(keys, deadline, place, take);
  return fetched;
}

}  // namespace spl::engine
