#include "services/engine/cache/sequence_kv.h"

#include <atomic>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

std::vector<int32_t> StreamsByRank(const KvShape& shape, int num_ranks) {
  std::vector<int32_t> streams;
  streams.reserve(static_cast<size_t>(shape.num_streams()));
  const int32_t heads = shape.num_kv_heads / num_ranks;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      for (int32_t head = rank * heads; head < (rank + 1) * heads; ++head)
        streams.push_back(layer * shape.num_kv_heads + head);
    }
  }
  return streams;
}

SequenceKv::SequenceKv(PagePool& pool, const KvShape& shape)
    : pool_(pool), id_(NextId()), shape_(shape), streams_(shape.num_streams()) {
  SPLICE_CHECK(shape.num_kv_heads % pool.view().num_ranks() == 0, "the pool's ranks do not divide the KV heads");
}

SequenceKv::~SequenceKv() {
  for (const auto& pages : streams_) pool_.Release(pages);
}

absl::Status SequenceKv::Reserve(int64_t num_tokens) {
  const int32_t missing = PagesFor(num_tokens) - num_pages_per_stream();
  if (missing <= 0) return absl::OkStatus();
  std::vector<int32_t> pages;
  SPLICE_RETURN_IF_ERROR(pool_.Allocate(static_cast<int64_t>(missing) * shape_.num_streams(), pages));
  // Stream by stream: what one layer writes lies together and travels as few large runs. Of several ranks each has the
  // same share of a layer's heads and of the pages.
  auto next = pages.begin();
  for (const int32_t s : StreamsByRank(shape_, pool_.view().num_ranks())) {
    streams_[static_cast<size_t>(s)].insert(streams_[static_cast<size_t>(s)].end(), next, next + missing);
    next += missing;
  }
  return absl::OkStatus();
}

void SequenceKv::AppendShared(std::span<const int32_t> pages) {
  SPLICE_CHECK(static_cast<int32_t>(pages.size()) == shape_.num_streams(), "one page per stream is needed");
  SPLICE_CHECK(num_tokens_ == capacity(), "a shared page would follow an unfinished one");
  pool_.Share(pages);
  for (size_t i = 0; i < pages.size(); ++i) streams_[i].push_back(pages[i]);
  num_tokens_ += kernels::kPageTokens;
}

absl::StatusOr<std::unique_ptr<SequenceKv>> SequenceKv::Fork() const {
  auto fork = std::make_unique<SequenceKv>(pool_, shape_);
  const int32_t full_pages = static_cast<int32_t>(num_tokens_ / kernels::kPageTokens);
  for (int32_t page = 0; page < full_pages; ++page) fork->AppendShared(PagesOfChunk(page));
  SPLICE_RETURN_IF_ERROR(fork->Reserve(num_tokens_));
  if (num_tokens_ % kernels::kPageTokens != 0) {
    SPLICE_RETURN_IF_ERROR(pool_.CopyPages(fork->PagesOfChunk(full_pages), PagesOfChunk(full_pages)));
  }
  fork->num_tokens_ = num_tokens_;
  fork->provenance_ = provenance_;
  fork->exact_end_ = exact_end_;
  return fork;
}

std::vector<int32_t> SequenceKv::PagesOfChunk(int32_t page_idx) const {
  std::vector<int32_t> pages;
  pages.reserve(streams_.size());
  for (const auto& stream : streams_) pages.push_back(stream[page_idx]);
  return pages;
}

std::vector<int32_t> SequenceKv::AllPages() const {
  std::vector<int32_t> pages;
  pages.reserve(streams_.size() * num_pages_per_stream());
  for (const auto& stream : streams_) pages.insert(pages.end(), stream.begin(), stream.end());
  return pages;
}

}  // namespace spl::engine
