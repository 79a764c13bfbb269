#include "services/engine/runtime/parked_pages.h"

#include <algorithm>
#include <new>
#include <unordered_map>

#include "services/base/status.h"

namespace spl::engine {
namespace {

// Calls visit(page) for every place that has one.
template <typename Visit>
void ForEachPlace(const PageHolders& holders, const Visit& visit) {
  const auto tables = [&](std::span<const std::vector<int32_t>> lists) {
    for (const std::vector<int32_t>& list : lists) {
      for (const int32_t page : list) {
        if (page != kernels::kNoPage) visit(page);
      }
    }
  };
  for (const SequenceKv* const kv : holders.kv) {
    if (kv != nullptr) tables(kv->streams());
  }
  for (const CompactPages* const compact : holders.compact) {
    if (compact != nullptr) tables(compact->tables());
  }
  for (const HotBuffer* const hot : holders.hot) {
    if (hot != nullptr) tables(hot->tables());
  }
}

std::vector<int64_t> CountByRank(const PagePool& pool, std::span<const int32_t> pages) {
  std::vector<int64_t> counts(pool.view().num_ranks());
  for (const int32_t page : pages) ++counts[pool.view().rank_of(page)];
  return counts;
}

}  // namespace

std::vector<int32_t> PageHolders::Pages(const PagePool& pool) const {
  std::vector<int32_t> pages;
  ForEachPlace(*this, [&](int32_t page) { pages.push_back(page); });
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  std::stable_sort(pages.begin(), pages.end(),
                   [&](int32_t a, int32_t b) { return pool.view().rank_of(a) < pool.view().rank_of(b); });
  return pages;
}

std::vector<int64_t> PageHolders::PagesByRank(const PagePool& pool) const { return CountByRank(pool, Pages(pool)); }

absl::StatusOr<std::unique_ptr<ParkedPages>> ParkedPages::Park(PagePool& pool, const PageHolders& holders) {
  auto parked = std::unique_ptr<ParkedPages>(new ParkedPages(pool, holders.Pages(pool)));
  parked->contents_.reset(new (std::nothrow) std::byte[parked->bytes()]);
  if (parked->contents_ == nullptr)
    return Errorf(absl::StatusCode::kResourceExhausted, "no host memory for {} bytes of KV", parked->bytes());
  SPLICE_RETURN_IF_ERROR(pool.ReadPages(parked->pages_, parked->contents_.get()));
  for (SequenceKv* const kv : holders.kv) {
    if (kv != nullptr) kv->Evict();
  }
  for (CompactPages* const compact : holders.compact) {
    if (compact != nullptr) compact->Evict();
  }
  for (HotBuffer* const hot : holders.hot) {
    if (hot != nullptr) hot->Evict();
  }
  return parked;
}

absl::Status ParkedPages::Return(const PageHolders& holders, std::span<const int64_t> spare) {
  const std::vector<int64_t> counts = CountByRank(pool_, pages_);
  std::vector<int64_t> needed = counts;
  for (size_t r = 0; r < needed.size(); ++r) needed[r] += spare[r];
  if (!pool_.HasFree(needed)) return absl::ResourceExhaustedError("no pages for a sequence that gave way");
  std::vector<int32_t> pages;
  SPLICE_RETURN_IF_ERROR(pool_.AllocateByRank(counts, pages));
  if (absl::Status written = pool_.WritePages(pages, contents_.get()); !written.ok()) {
    pool_.Release(pages);
    return written;
  }
  std::unordered_map<int32_t, int32_t> page_of;
  for (size_t i = 0; i < pages.size(); ++i) page_of.emplace(pages_[i], pages[i]);
  std::vector<int32_t> places;
  ForEachPlace(holders, [&](int32_t page) { places.push_back(page_of.at(page)); });
  pool_.Share(places);
  pool_.Release(pages);  // the share that came with the allocation: each place has its own
  for (SequenceKv* const kv : holders.kv) {
    if (kv != nullptr) kv->Refill(page_of);
  }
  for (CompactPages* const compact : holders.compact) {
    if (compact != nullptr) compact->Refill(page_of);
  }
  absl::Status status;
  for (HotBuffer* const hot : holders.hot) {
    if (hot != nullptr) status.Update(hot->Refill(page_of));
  }
  return status;
}

}  // namespace spl::engine
