#include "services/engine/cache/sequence_kv.h"

#include <atomic>
#include <iterator>
#include <utility>

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
  streams.reserve(shape.num_streams());
  const int32_t heads = shape.num_kv_heads / num_ranks;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      for (int32_t head = rank * heads; head < (rank + 1) * heads; ++head)
        streams.push_back(layer * shape.num_kv_heads + head);
    }
  }
  return streams;
}

std::vector<int64_t> PagesByRank(const KvShape& shape, const StreamClasses* classes, int num_ranks,
                                 int64_t num_tokens) {
  std::vector<int64_t> counts(num_ranks);
  const int32_t heads = shape.num_kv_heads / num_ranks;
  for (int32_t s = 0; s < shape.num_streams(); ++s) {
    const int32_t hole = classes == nullptr ? 0 : HoleOf((*classes)[s], num_tokens).size();
    counts[s % shape.num_kv_heads / heads] += PagesFor(num_tokens) - hole;
  }
  return counts;
}

SequenceKv::SequenceKv(PagePool& pool, const KvShape& shape, std::shared_ptr<const StreamClasses> classes)
    : pool_(pool),
      id_(NextId()),
      shape_(shape),
      classes_(std::move(classes)),
      streams_(shape.num_streams()),
      holes_(classes_ == nullptr ? 0 : static_cast<size_t>(shape.num_streams())) {
  SPLICE_CHECK(shape.num_kv_heads % pool.view().num_ranks() == 0, "the pool's ranks do not divide the KV heads");
  SPLICE_CHECK(classes_ == nullptr || classes_->size() == streams_.size(), "a class for each head stream");
}

SequenceKv::~SequenceKv() {
  for (const auto& pages : streams_) {
    if (!evicted_) pool_.Release(pages);
  }
}

void SequenceKv::Evict() {
  SPLICE_CHECK(!evicted_, "a sequence that has its pages");
  for (const auto& pages : streams_) pool_.Release(pages);
  evicted_ = true;
}

void SequenceKv::Refill(const std::unordered_map<int32_t, int32_t>& pages) {
  SPLICE_CHECK(evicted_, "a sequence that gave its pages back");
  for (std::vector<int32_t>& stream : streams_) {
    for (int32_t& page : stream) {
      if (page != kernels::kNoPage) page = pages.at(page);
    }
  }
  evicted_ = false;
  id_ = NextId();
}

size_t SequenceKv::RankOf(int32_t stream) const {
  return static_cast<size_t>(stream % shape_.num_kv_heads / (shape_.num_kv_heads / pool_.view().num_ranks()));
}

bool SequenceKv::Keeps(int32_t stream, int32_t page) const {
  return kept_ == nullptr || kept_->KeepsPage(stream / shape_.num_kv_heads, page);
}

absl::Status SequenceKv::Reserve(int64_t num_tokens) {
  if (num_tokens <= settled_until_) return absl::OkStatus();
  return ReservePages(std::max(num_pages_per_stream(), PagesFor(num_tokens)), num_tokens);
}

absl::Status SequenceKv::ReservePages(int32_t end, int64_t num_tokens) {
  const int32_t begin = num_pages_per_stream();
  // Gives pages stream by stream: the pages that one layer writes lie together, and travel as few large runs. Those of
  // the last page, which is not full, lie behind those of all streams of the rank: they are given back before full
  // pages, which caches keep, and would leave a hole of one page behind each stream.
  const std::vector<int32_t> order = StreamsByRank(shape_, pool_.view().num_ranks());
  std::vector<PageHole> holes(holes_.size());
  std::vector<int64_t> counts(pool_.view().num_ranks());
  for (const int32_t stream : order) {
    const auto s = static_cast<size_t>(stream);
    if (!holes.empty()) holes[s] = HoleOf((*classes_)[s], num_tokens);
    const PageHole hole = holes.empty() ? PageHole{} : holes[s];
    counts[RankOf(stream)] += end - begin - std::max(0, std::min(hole.end, end) - std::max(hole.begin, begin));
    for (int32_t page = begin; page < end && kept_ != nullptr; ++page) counts[RankOf(stream)] -= !Keeps(stream, page);
  }
  std::vector<int32_t> pages;
  SPLICE_RETURN_IF_ERROR(pool_.AllocateByRank(counts, pages));
  auto next = pages.begin();
  const auto give = [&](std::span<const int32_t> streams, int32_t first, int32_t last) {
    for (const int32_t stream : streams) {
      const PageHole hole = holes.empty() ? PageHole{} : holes[static_cast<size_t>(stream)];
      for (int32_t page = first; page < last; ++page) {
        const bool there = (page < hole.begin || page >= hole.end) && Keeps(stream, page);
        streams_[static_cast<size_t>(stream)].push_back(there ? *next++ : kernels::kNoPage);
        num_dropped_ += !Keeps(stream, page);
      }
    }
  };
  const int32_t unfinished = std::max(begin, num_tokens % kernels::kPageTokens == 0 ? end : end - 1);
  const size_t of_rank = order.size() / static_cast<size_t>(pool_.view().num_ranks());
  for (size_t first = 0; first < order.size(); first += of_rank) {
    const auto streams = std::span(order).subspan(first, of_rank);
    give(streams, begin, unfinished);
    give(streams, unfinished, end);
  }
  std::vector<int32_t> left_out;
  for (const int32_t stream : order) {
    const auto s = static_cast<size_t>(stream);
    const PageHole hole = holes.empty() ? PageHole{} : holes[s];
    if (hole.size() == 0) continue;
    for (int32_t page = std::max(hole.begin, holes_[s].end); page < std::min(hole.end, begin); ++page) {
      int32_t& entry = streams_[s][page];
      if (entry != kernels::kNoPage) left_out.push_back(std::exchange(entry, kernels::kNoPage));
    }
  }
  pool_.Release(left_out);
  holes_ = std::move(holes);
  settled_until_ = capacity();
  if (classes_ != nullptr) {
    for (const HeadClass& head : *classes_) settled_until_ = std::min(settled_until_, HoleLastsUntil(head, num_tokens));
  }
  return absl::OkStatus();
}

void SequenceKv::Compress(std::shared_ptr<const StreamClasses> classes) {
  SPLICE_CHECK(classes_ == nullptr && classes != nullptr && classes->size() == streams_.size(),
               "a whole sequence and a class for each of its head streams");
  SPLICE_CHECK(num_pages_per_stream() == PagesFor(num_tokens_), "no room behind the written positions");
  classes_ = std::move(classes);
  holes_.assign(streams_.size(), {});
  // Takes no pages, so that it cannot fail.
  const absl::Status status = ReservePages(num_pages_per_stream(), num_tokens_);
  SPLICE_CHECK(status.ok(), "giving pages back");
}

void SequenceKv::Restore(int32_t stream, std::span<const int32_t> pages) {
  const auto s = static_cast<size_t>(stream);
  SPLICE_CHECK(classes_ != nullptr && s < streams_.size() && !(*classes_)[s].is_global, "a local head is restored");
  SPLICE_CHECK(pages.size() == static_cast<size_t>(holes_[s].size()), "pages for all of the hole");
  for (const int32_t page : pages)
    SPLICE_CHECK(static_cast<size_t>(pool_.view().rank_of(page)) == RankOf(stream), "a page of the head's own rank");
  std::copy(pages.begin(), pages.end(), streams_[s].begin() + holes_[s].begin);
  holes_[s] = {};
  classes_ = WithRestored(classes_, {&stream, 1});
  id_ = NextId();
}

void SequenceKv::KeepOnly(std::shared_ptr<const KeptTokens> kept) {
  SPLICE_CHECK(is_whole() && kept != nullptr && kept->num_tokens == num_tokens_, "a whole sequence behind its prompt");
  kept_ = std::move(kept);
  std::vector<int32_t> left_out;
  for (int32_t s = 0; s < shape_.num_streams(); ++s) {
    for (int32_t page = 0; page < num_pages_per_stream(); ++page) {
      if (!kept_->KeepsPage(s / shape_.num_kv_heads, page))
        left_out.push_back(std::exchange(streams_[s][page], kernels::kNoPage));
    }
  }
  num_dropped_ = static_cast<int64_t>(left_out.size());
  pool_.Release(left_out);
}

std::vector<int32_t> SequenceKv::MoveOut(int32_t stream, int32_t begin, int32_t end) {
  SPLICE_CHECK(classes_ == nullptr && kept_ == nullptr && !evicted_, "a sequence that left nothing out");
  moved_out_.resize(streams_.size());
  int32_t& moved = moved_out_[static_cast<size_t>(stream)];
  SPLICE_CHECK(moved == begin && end >= begin && int64_t{end} * kernels::kPageTokens <= num_tokens_,
               "the next full pages of the stream");
  std::vector<int32_t>& pages = streams_[static_cast<size_t>(stream)];
  const std::vector<int32_t> taken(pages.begin() + begin, pages.begin() + end);
  std::fill(pages.begin() + begin, pages.begin() + end, kernels::kNoPage);
  moved = end;
  num_moved_ += end - begin;
  return taken;
}

void SequenceKv::Truncate(int64_t num_tokens) {
  const auto pages = static_cast<size_t>(PagesFor(num_tokens));
  SPLICE_CHECK(is_whole() && num_tokens >= 0 && num_tokens <= capacity(), "a whole sequence of at least as many pages");
  std::vector<int32_t> left_out;
  for (std::vector<int32_t>& stream : streams_) {
    left_out.insert(left_out.end(), stream.begin() + static_cast<std::ptrdiff_t>(pages), stream.end());
    stream.resize(pages);
  }
  pool_.Release(left_out);
  num_tokens_ = std::min(num_tokens_, num_tokens);
  settled_until_ = capacity();
  id_ = NextId();
}

void SequenceKv::AppendShared(std::span<const int32_t> pages) {
  SPLICE_CHECK(static_cast<int32_t>(pages.size()) == shape_.num_streams(), "one page per stream is needed");
  pool_.Share(pages);
  AppendToStreams(1, [&](size_t stream) { return pages.subspan(stream, 1); });
}

void SequenceKv::AppendPlaces(const SequenceKv& from, int32_t begin, int32_t end) {
  SPLICE_CHECK(begin >= 0 && begin <= end && end <= from.num_pages_per_stream(), "places of the other sequence");
  AppendToStreams(end - begin, [&](size_t stream) {
    const auto pages =
        std::span(from.streams_[stream]).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    pool_.Share(pages);
    return pages;
  });
}

template <typename PagesOf>
void SequenceKv::AppendToStreams(int32_t num_places, const PagesOf& pages_of) {
  SPLICE_CHECK(num_tokens_ == capacity(), "a shared page would follow an unfinished one");
  for (size_t i = 0; i < streams_.size(); ++i) {
    const std::span<const int32_t> pages = pages_of(i);
    const auto missing = std::count(pages.begin(), pages.end(), kernels::kNoPage);
    SPLICE_CHECK(missing == 0 || kept_ != nullptr || (classes_ != nullptr && !(*classes_)[i].is_global),
                 "a page is missing in a stream that keeps everything");
    if (kept_ != nullptr) num_dropped_ += missing;
    streams_[i].insert(streams_[i].end(), pages.begin(), pages.end());
  }
  num_tokens_ += int64_t{num_places} * kernels::kPageTokens;
  if (classes_ == nullptr) settled_until_ = capacity();  // otherwise the next Reserve checks the holes
}

void SequenceKv::AppendLeading(const SequenceKv& from, int32_t num_pages) {
  SPLICE_CHECK(num_tokens_ == 0 && int64_t{num_pages} * kernels::kPageTokens <= from.num_tokens_,
               "leading pages that are written, into an empty sequence");
  AppendPlaces(from, 0, num_pages);
  if (from.exact_end_ < num_tokens_) LowerProvenance(from.provenance_, from.exact_end_);
}

absl::StatusOr<std::unique_ptr<SequenceKv>> SequenceKv::Fork(int64_t own_from) const {
  SPLICE_CHECK(!is_moved(), "a sequence that has its pages");
  auto fork = std::make_unique<SequenceKv>(pool_, shape_, classes_);
  fork->kept_ = kept_;
  const auto full_pages = static_cast<int32_t>(std::min(own_from, num_tokens_) / kernels::kPageTokens);
  fork->AppendLeading(*this, full_pages);
  SPLICE_RETURN_IF_ERROR(fork->Reserve(num_tokens_));
  for (int32_t page = full_pages; page < PagesFor(num_tokens_); ++page) {
    std::vector<int32_t> to = fork->PagesOfChunk(page), from = PagesOfChunk(page);
    std::erase(to, kernels::kNoPage);
    std::erase(from, kernels::kNoPage);
    SPLICE_CHECK(to.size() == from.size(), "a fork keeps what its sequence does");
    SPLICE_RETURN_IF_ERROR(pool_.CopyPages(to, from));
  }
  fork->num_tokens_ = num_tokens_;
  fork->provenance_ = provenance_;
  fork->exact_end_ = exact_end_;
  return fork;
}

std::unique_ptr<SequenceKv> SequenceKv::Continue() const {
  SPLICE_CHECK(is_whole() && !evicted_, "a whole sequence that has its pages");
  auto next = std::make_unique<SequenceKv>(pool_, shape_);
  for (const std::vector<int32_t>& pages : streams_) pool_.Share(pages);
  next->streams_.assign(streams_.begin(), streams_.end());
  next->num_tokens_ = num_tokens_;
  next->settled_until_ = capacity();
  next->provenance_ = provenance_;
  next->exact_end_ = exact_end_;
  return next;
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
  for (const auto& stream : streams_)
    std::copy_if(stream.begin(), stream.end(), std::back_inserter(pages),
                 [](int32_t page) { return page != kernels::kNoPage; });
  return pages;
}

int64_t SequenceKv::num_pages() const {
  int64_t count = static_cast<int64_t>(streams_.size()) * num_pages_per_stream() - num_dropped_ - num_moved_;
  for (const PageHole& hole : holes_) count -= hole.size();
  return count;
}

void SequenceKv::CheckInvariants() const {
  const auto pages_of = [](int64_t tokens) { return static_cast<int32_t>(PagesFor(tokens)); };
  for (size_t s = 0; s < streams_.size(); ++s) {
    const PageHole hole = classes_ == nullptr ? PageHole{} : holes_[s];
    SPLICE_CHECK(static_cast<int32_t>(streams_[s].size()) == num_pages_per_stream(), "streams of different lengths");
    for (int32_t page = 0; page < num_pages_per_stream(); ++page) {
      const int32_t entry = streams_[s][page];
      const bool in_hole = (page >= hole.begin && page < hole.end) || (!moved_out_.empty() && page < moved_out_[s]) ||
                           (kept_ != nullptr && !kept_->KeepsPage(static_cast<int32_t>(s) / shape_.num_kv_heads, page));
      SPLICE_CHECK((entry == kernels::kNoPage) == in_hole, "a page in a hole, or none outside of it");
      SPLICE_CHECK(in_hole || (pool_.owners(entry) > 0 &&
                               static_cast<size_t>(pool_.view().rank_of(entry)) == RankOf(static_cast<int32_t>(s))),
                   "a listed page is free, or of another rank");
    }
    if (hole.size() == 0) continue;
    const HeadClass& head = (*classes_)[s];
    SPLICE_CHECK(!head.is_global && hole.begin == pages_of(head.sinks), "pages of sinks in front of the hole");
    SPLICE_CHECK(num_pages_per_stream() - hole.end <= pages_of(head.window) + 1, "no more than a window behind it");
  }
}

}  // namespace spl::engine
