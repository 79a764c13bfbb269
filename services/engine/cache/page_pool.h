// Allocator of KV pages: tracks free pages and the number of owners of the others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend/backend.h"
#include "kernels/common/kv_pool.h"
#include "services/engine/cache/kv_memory.h"

namespace spl::engine {

// Borrows the memory (a backend buffer or registered transport memory), which must outlive the pool. Any thread may
// call: reservations come from RPC threads, growth from the engine thread. With several ranks (kv_memory.h), an
// allocation says how many pages it needs on each: a sequence has the same number of heads on every rank, but these may
// keep different numbers of pages.
//
// Some owners are caches, which let go of a page when others need it (evict). A page is available if it is free, or if
// all of its owners are caches.
//
// Invariants: a page is free or has owners, never both; free runs are disjoint, maximal within a part, and sum to its
// number of free pages; runs_by_length has the same runs; caches are at most all of a page's owners.
class PagePool {
 public:
  // `backend` (borrowed) copies memory that the host cannot access; null: the view is host memory.
  explicit PagePool(const kernels::KvPoolView& view, const kernels::Backend* backend = nullptr)
      : PagePool(KvPartitions(view), {backend}) {}
  // `backends`: one per part, borrowed.
  PagePool(const KvPartitions& partitions, std::vector<const kernels::Backend*> backends);

  // Appends `count` pages with one owner each to `pages`, or none: ResourceExhausted names both numbers. With several
  // ranks, which must divide `count`, each rank gives the same share, in order of ranks. Pages of a rank come in
  // ascending runs, as a single run if the pool has one, so that neighbours travel in one transfer: the shortest one
  // that is long enough, or else the longest ones. Cost: logarithmic in the number of free runs, for each run taken.
  absl::Status Allocate(int64_t count, std::vector<int32_t>& pages);
  // The same with counts[r] pages of rank r; `counts`: [num_ranks].
  absl::Status AllocateByRank(std::span<const int64_t> counts, std::vector<int32_t>& pages);
  // Entries that are kNoPage are ignored here and below.
  void Share(std::span<const int32_t> pages);    // each gets one owner more
  void Release(std::span<const int32_t> pages);  // each loses one owner; a page without owners is free
  int32_t owners(int32_t page) const;
  // Say that one more of each page's owners is a cache, or that one such owner is none any more. An owner that is a
  // cache must call UnmarkCached before it releases the page.
  void MarkCached(std::span<const int32_t> pages);
  void UnmarkCached(std::span<const int32_t> pages);
  // Calls `freed` once, when pages become free for the next time, on the thread that releases them. Replaces an earlier
  // one; null takes it back, and it is not running any more on return. `freed` must not call this function.
  void OnNextFree(std::function<void()> freed);

  int64_t num_free() const;  // what Allocate can give: free pages of the fullest rank × ranks
  bool HasFree(std::span<const int64_t> counts) const;  // AllocateByRank would succeed
  // The same with all caches evicted.
  int64_t num_available() const;
  bool HasAvailable(std::span<const int64_t> counts) const;
  int64_t num_pages() const { return view_.num_pages(); }
  const KvPartitions& view() const { return view_; }
  const kernels::Backend* backend(size_t rank) const { return backends_[rank]; }

  // Reading and writing of contents, complete on return. REQUIRES: the caller is an owner of the pages, and no pass
  // writes them.
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) const;  // [pages.size()] pages, contiguous
  absl::Status ReadPagesTo(std::span<const int32_t> pages, std::span<std::byte* const> out) const;  // a place for each
  absl::Status WritePagesFrom(std::span<const int32_t> pages, std::span<const std::byte* const> in);
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in);
  absl::Status ChecksumPages(std::span<const int32_t> pages, uint32_t* out) const;  // CRC32C of each
  bool host_memory() const { return backends_[0] == nullptr || backends_[0]->host_memory(); }
  absl::Status CopyPages(std::span<const int32_t> to, std::span<const int32_t> from);

  // Adds a copy to a list. A copy that continues the last one on both sides is merged into it.
  static void Append(std::vector<kernels::CopyOp>& ops, const kernels::CopyOp& op);

  void CheckInvariants() const;  // aborts on a broken one

 private:
  // Pages of one rank.
  struct Part {
    std::map<int32_t, int32_t> free_runs;  // first page → length
    // The same as (length, first page). A pool with cached text has runs of single pages by the hundred thousand.
    std::set<std::pair<int32_t, int32_t>> runs_by_length;
    int64_t num_free = 0;
    int64_t num_cached = 0;  // whose owners are all caches
  };
  // [rank]: copies of its pages.
  using RankOps = std::vector<std::vector<kernels::CopyOp>>;
  RankOps OpsByRank() const { return RankOps(backends_.size()); }

  void TakeLocked(Part& part, int64_t count, std::vector<int32_t>& pages);
  // Changes the owners of a page, and how many of them are caches.
  void AddLocked(int32_t page, int32_t owners, int32_t caches);
  void FreeRunLocked(int32_t first, int32_t count);
  bool ReleaseLocked(std::span<const int32_t> pages);  // whether pages became free
  void TellFreed();
  int64_t NumLocked(bool with_cached) const;
  bool HasLocked(std::span<const int64_t> counts, bool with_cached) const;
  absl::Status Copy(kernels::CopyKind kind, const RankOps& ops) const;

  const KvPartitions view_;
  const std::vector<const kernels::Backend*> backends_;
  mutable std::mutex mutex_;     // guards owners_, caches_ and parts_
  std::vector<int32_t> owners_;  // [num_pages]
  std::vector<int32_t> caches_;  // [num_pages]: of the owners, those that are caches
  std::vector<Part> parts_;
  std::atomic<bool> has_listener_{false};  // whether on_next_free_ is set: Release asks without a lock
  std::mutex listener_mutex_;              // guards on_next_free_; held while it runs
  std::function<void()> on_next_free_;
};

}  // namespace spl::engine
