#include "services/engine/cache/page_pool.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

PagePool::PagePool(const KvPartitions& partitions, std::vector<const kernels::Backend*> backends)
    : view_(partitions),
      backends_(std::move(backends)),
      owners_(partitions.num_pages(), 0),
      caches_(partitions.num_pages(), 0),
      parts_(partitions.num_ranks()) {
  SPLICE_CHECK(backends_.size() == parts_.size(), "a page pool needs one backend for each part");
  for (int r = 0; r < view_.num_ranks(); ++r) {
    parts_[r].num_free = view_.pages_per_rank();
    if (view_.pages_per_rank() == 0) continue;
    parts_[r].free_runs[view_.rank(r).first_page] = view_.pages_per_rank();
    parts_[r].runs_by_length.emplace(view_.pages_per_rank(), view_.rank(r).first_page);
  }
}

absl::Status PagePool::Allocate(int64_t count, std::vector<int32_t>& pages) {
  SPLICE_CHECK(count % view_.num_ranks() == 0, "pages are allocated on all ranks alike");
  return AllocateByRank(std::vector<int64_t>(parts_.size(), count / view_.num_ranks()), pages);
}

absl::Status PagePool::AllocateByRank(std::span<const int64_t> counts, std::vector<int32_t>& pages) {
  pages.clear();
  const int64_t count = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (count == 0) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  if (!HasLocked(counts, false))
    return Errorf(absl::StatusCode::kResourceExhausted, "KV pool: {} pages asked for, {} of {} are free", count,
                  NumLocked(false), view_.num_pages());
  pages.reserve(count);
  for (size_t r = 0; r < parts_.size(); ++r) {
    if (counts[r] > 0) TakeLocked(parts_[r], counts[r], pages);
  }
  return absl::OkStatus();
}

void PagePool::TakeLocked(Part& part, int64_t count, std::vector<int32_t>& pages) {
  part.num_free -= count;
  std::vector<std::pair<int32_t, int32_t>> taken;  // first page, length
  while (count > 0) {
    // The pool has so many free pages, so that there is a run.
    auto run = part.runs_by_length.lower_bound({static_cast<int32_t>(count), 0});
    if (run == part.runs_by_length.end()) --run;
    const auto [length, first] = *run;
    const auto take = static_cast<int32_t>(std::min<int64_t>(length, count));
    part.runs_by_length.erase(run);
    const auto next = part.free_runs.erase(part.free_runs.find(first));
    if (take < length) {
      part.free_runs.emplace_hint(next, first + take, length - take);
      part.runs_by_length.emplace(length - take, first + take);
    }
    taken.emplace_back(first, take);
    count -= take;
  }
  std::sort(taken.begin(), taken.end());
  for (const auto& [first, length] : taken) {
    for (int32_t page = first; page < first + length; ++page) {
      pages.push_back(page);
      owners_[page] = 1;
    }
  }
}

void PagePool::Append(std::vector<kernels::CopyOp>& ops, const kernels::CopyOp& op) {
  if (!ops.empty()) {
    kernels::CopyOp& last = ops.back();
    if (static_cast<std::byte*>(last.to) + last.bytes == op.to &&
        static_cast<const std::byte*>(last.from) + last.bytes == op.from) {
      last.bytes += op.bytes;
      return;
    }
  }
  ops.push_back(op);
}

absl::Status PagePool::Copy(kernels::CopyKind kind, const RankOps& ops) const {
  for (size_t r = 0; r < ops.size(); ++r) {
    if (ops[r].empty()) continue;
    if (backends_[r] != nullptr) {
      SPLICE_RETURN_IF_ERROR(backends_[r]->Copy(kind, ops[r]));
      continue;
    }
    for (const kernels::CopyOp& op : ops[r]) std::memcpy(op.to, op.from, op.bytes);
  }
  return absl::OkStatus();
}

absl::Status PagePool::ReadPages(std::span<const int32_t> pages, std::byte* out) const {
  RankOps ops = OpsByRank();
  for (size_t i = 0; i < pages.size(); ++i)
    Append(ops[view_.rank_of(pages[i])], {out + i * view_.page_bytes(), view_.k(pages[i]), view_.page_bytes()});
  return Copy(kernels::CopyKind::kDownload, ops);
}

absl::Status PagePool::ReadPagesTo(std::span<const int32_t> pages, std::span<std::byte* const> out) const {
  RankOps ops = OpsByRank();
  for (size_t i = 0; i < pages.size(); ++i)
    Append(ops[view_.rank_of(pages[i])], {out[i], view_.k(pages[i]), view_.page_bytes()});
  return Copy(kernels::CopyKind::kDownload, ops);
}

absl::Status PagePool::WritePagesFrom(std::span<const int32_t> pages, std::span<const std::byte* const> in) {
  RankOps ops = OpsByRank();
  for (size_t i = 0; i < pages.size(); ++i)
    Append(ops[view_.rank_of(pages[i])], {view_.k(pages[i]), in[i], view_.page_bytes()});
  return Copy(kernels::CopyKind::kUpload, ops);
}

absl::Status PagePool::WritePages(std::span<const int32_t> pages, const std::byte* in) {
  RankOps ops = OpsByRank();
  for (size_t i = 0; i < pages.size(); ++i)
    Append(ops[view_.rank_of(pages[i])], {view_.k(pages[i]), in + i * view_.page_bytes(), view_.page_bytes()});
  return Copy(kernels::CopyKind::kUpload, ops);
}

absl::Status PagePool::ChecksumPages(std::span<const int32_t> pages, uint32_t* out) const {
  if (host_memory()) {
    for (size_t i = 0; i < pages.size(); ++i) out[i] = kernels::Crc32cExtend(0, view_.k(pages[i]), view_.page_bytes());
    return absl::OkStatus();
  }
  if (backends_.size() == 1) return backends_[0]->PageChecksums(view_.rank(0), pages, out);
  std::vector<int32_t> of_rank;
  std::vector<uint32_t> crcs;
  for (int r = 0; r < view_.num_ranks(); ++r) {
    of_rank.clear();
    std::copy_if(pages.begin(), pages.end(), std::back_inserter(of_rank),
                 [&](int32_t page) { return view_.rank_of(page) == r; });
    crcs.resize(of_rank.size());
    SPLICE_RETURN_IF_ERROR(backends_[r]->PageChecksums(view_.rank(r), of_rank, crcs.data()));
    for (size_t i = 0, next = 0; i < pages.size(); ++i) {
      if (view_.rank_of(pages[i]) == r) out[i] = crcs[next++];
    }
  }
  return absl::OkStatus();
}

absl::Status PagePool::CopyPages(std::span<const int32_t> to, std::span<const int32_t> from) {
  RankOps ops = OpsByRank();
  for (size_t i = 0; i < to.size(); ++i) {
    SPLICE_CHECK(view_.rank_of(to[i]) == view_.rank_of(from[i]), "a page is copied on its own rank");
    Append(ops[view_.rank_of(to[i])], {view_.k(to[i]), view_.k(from[i]), view_.page_bytes()});
  }
  return Copy(kernels::CopyKind::kWithin, ops);
}

void PagePool::Share(std::span<const int32_t> pages) {
  std::lock_guard lock(mutex_);
  for (int32_t page : pages) {
    if (page == kernels::kNoPage) continue;
    SPLICE_CHECK(owners_[page] > 0, "sharing a free page");
    AddLocked(page, 1, 0);
  }
}

void PagePool::MarkCached(std::span<const int32_t> pages) {
  std::lock_guard lock(mutex_);
  for (const int32_t page : pages) {
    if (page != kernels::kNoPage) AddLocked(page, 0, 1);
  }
}

void PagePool::UnmarkCached(std::span<const int32_t> pages) {
  std::lock_guard lock(mutex_);
  for (const int32_t page : pages) {
    if (page != kernels::kNoPage) AddLocked(page, 0, -1);
  }
}

void PagePool::AddLocked(int32_t page, int32_t owners, int32_t caches) {
  int32_t& all = owners_[page];
  int32_t& cached = caches_[page];
  const bool was_cached = cached > 0 && cached == all;
  all += owners;
  cached += caches;
  SPLICE_CHECK(cached >= 0 && cached <= all, "more caches than owners, or fewer than none");
  const bool is_cached = cached > 0 && cached == all;
  if (is_cached != was_cached) parts_[view_.rank_of(page)].num_cached += is_cached ? 1 : -1;
}

void PagePool::Release(std::span<const int32_t> pages) {
  bool freed = false;
  {
    std::lock_guard lock(mutex_);
    freed = ReleaseLocked(pages);
  }
  if (freed && has_listener_) TellFreed();
}

void PagePool::OnNextFree(std::function<void()> freed) {
  std::lock_guard lock(listener_mutex_);
  on_next_free_ = std::move(freed);
  has_listener_ = on_next_free_ != nullptr;
}

void PagePool::TellFreed() {
  std::lock_guard lock(listener_mutex_);
  has_listener_ = false;
  if (const auto freed = std::exchange(on_next_free_, nullptr)) freed();
}

bool PagePool::ReleaseLocked(std::span<const int32_t> pages) {
  // Frees neighbours as one run: most pages of a sequence are neighbours.
  int32_t first = 0, count = 0;
  for (int32_t page : pages) {
    if (page == kernels::kNoPage) continue;
    SPLICE_CHECK(owners_[page] > 0, "releasing a free page");
    AddLocked(page, -1, 0);
    if (owners_[page] > 0) continue;
    if (count > 0 && page == first + count && view_.rank_of(page) == view_.rank_of(first)) {
      ++count;
      continue;
    }
    if (count > 0) FreeRunLocked(first, count);
    first = page;
    count = 1;
  }
  if (count > 0) FreeRunLocked(first, count);
  return count > 0;
}

void PagePool::FreeRunLocked(int32_t first, int32_t count) {
  Part& part = parts_[view_.rank_of(first)];
  part.num_free += count;
  auto next = part.free_runs.lower_bound(first);
  if (next != part.free_runs.end() && next->first == first + count) {
    count += next->second;
    part.runs_by_length.erase({next->second, next->first});
    next = part.free_runs.erase(next);
  }
  if (next != part.free_runs.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == first) {
      part.runs_by_length.erase({previous->second, previous->first});
      previous->second += count;
      part.runs_by_length.emplace(previous->second, previous->first);
      return;
    }
  }
  part.free_runs.emplace_hint(next, first, count);
  part.runs_by_length.emplace(count, first);
}

int32_t PagePool::owners(int32_t page) const {
  std::lock_guard lock(mutex_);
  return owners_[page];
}

int64_t PagePool::num_free() const {
  std::lock_guard lock(mutex_);
  return NumLocked(false);
}

bool PagePool::HasFree(std::span<const int64_t> counts) const {
  std::lock_guard lock(mutex_);
  return HasLocked(counts, false);
}

int64_t PagePool::num_available() const {
  std::lock_guard lock(mutex_);
  return NumLocked(true);
}

bool PagePool::HasAvailable(std::span<const int64_t> counts) const {
  std::lock_guard lock(mutex_);
  return HasLocked(counts, true);
}

bool PagePool::HasLocked(std::span<const int64_t> counts, bool with_cached) const {
  SPLICE_CHECK(counts.size() == parts_.size(), "a number of pages for each rank");
  for (size_t r = 0; r < parts_.size(); ++r) {
    if (counts[r] > parts_[r].num_free + (with_cached ? parts_[r].num_cached : 0)) return false;
  }
  return true;
}

int64_t PagePool::NumLocked(bool with_cached) const {
  int64_t fewest = view_.pages_per_rank();
  for (const Part& part : parts_) fewest = std::min(fewest, part.num_free + (with_cached ? part.num_cached : 0));
  return fewest * view_.num_ranks();
}

void PagePool::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  int64_t free_pages = 0;
  for (int r = 0; r < view_.num_ranks(); ++r) {
    int64_t free_of_part = 0;
    int32_t last_end = -1;
    SPLICE_CHECK(parts_[r].runs_by_length.size() == parts_[r].free_runs.size(), "runs by length are not the free runs");
    for (const auto& [first, length] : parts_[r].free_runs) {
      SPLICE_CHECK(parts_[r].runs_by_length.contains({length, first}), "a free run is not among those by length");
      SPLICE_CHECK(length > 0 && first > last_end, "free runs are not disjoint and maximal");
      SPLICE_CHECK(view_.rank(r).contains(first) && view_.rank(r).contains(first + length - 1),
                   "a free run leaves its part");
      for (int32_t page = first; page < first + length; ++page)
        SPLICE_CHECK(owners_[page] == 0, "a free page has owners");
      free_of_part += length;
      last_end = first + length;
    }
    SPLICE_CHECK(free_of_part == parts_[r].num_free, "free runs do not sum to num_free");
    int64_t cached_of_part = 0;
    for (int32_t page = view_.rank(r).first_page; page < view_.rank(r).first_page + view_.pages_per_rank(); ++page)
      cached_of_part += caches_[page] > 0 && caches_[page] == owners_[page] ? 1 : 0;
    SPLICE_CHECK(cached_of_part == parts_[r].num_cached, "cached pages do not sum to num_cached");
    free_pages += free_of_part;
  }
  const int64_t owned = std::count_if(owners_.begin(), owners_.end(), [](int32_t n) { return n > 0; });
  SPLICE_CHECK(owned + free_pages == view_.num_pages(), "a page is neither free nor owned");
}

}  // namespace spl::engine
