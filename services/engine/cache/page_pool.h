// Bookkeeping of KV pages: which are free, and how many owners the others have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend/backend.h"
#include "kernels/common/kv_pool.h"
#include "services/engine/cache/kv_memory.h"

namespace spl::engine {

// Hands out pages of a memory region that somebody else owns (a backend buffer or registered transport memory; it must
// outlive the pool). Any thread may call: reservations come from RPC threads, growth from the engine thread.
// With several ranks (kv_memory.h) an allocation says how many pages it wants of each: a sequence has equally many
// heads on every rank, but they need not keep equally much. Invariants: a page is free or has owners, never both; free
// runs are disjoint, maximal within a part and sum to its number of free pages.
class PagePool {
 public:
  // `backend` copies what the host cannot reach itself; null: the view is host memory. Borrowed.
  explicit PagePool(const kernels::KvPoolView& view, const kernels::Backend* backend = nullptr)
      : PagePool(KvPartitions(view), {backend}) {}
  // One backend for each part.
  PagePool(const KvPartitions& partitions, std::vector<const kernels::Backend*> backends);

  // `count` pages with one owner each, or none at all (ResourceExhausted with both numbers). Of several
  // ranks, which divide `count`: the share of each, one behind the other. Pages of a rank come in ascending runs, one
  // single run when the pool has it: neighbours travel in one transfer.
  absl::Status Allocate(int64_t count, std::vector<int32_t>& pages);
  // The same with counts[r] pages of rank r. [num_ranks]
  absl::Status AllocateByRank(std::span<const int64_t> counts, std::vector<int32_t>& pages);
  // Entries that are kNoPage are left alone.
  void Share(std::span<const int32_t> pages);    // one more owner each
  void Release(std::span<const int32_t> pages);  // one owner less each; a page without owners is free
  int32_t owners(int32_t page) const;

  int64_t num_free() const;                             // what Allocate can give: the fullest rank counts for all
  bool HasFree(std::span<const int64_t> counts) const;  // as AllocateByRank takes them
  int64_t num_pages() const { return view_.num_pages(); }
  const KvPartitions& view() const { return view_; }
  const kernels::Backend* backend(size_t rank) const { return backends_[rank]; }

  // Contents, complete on return; the caller holds a share of the pages and no pass is writing them.
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) const;  // [pages.size()] pages, contiguous
  absl::Status ReadPagesTo(std::span<const int32_t> pages, std::span<std::byte* const> out) const;  // a place for each
  absl::Status WritePagesFrom(std::span<const int32_t> pages, std::span<const std::byte* const> in);
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in);
  absl::Status ChecksumPages(std::span<const int32_t> pages, uint32_t* out) const;  // CRC32C of each
  bool host_memory() const { return backends_[0] == nullptr || backends_[0]->host_memory(); }
  absl::Status CopyPages(std::span<const int32_t> to, std::span<const int32_t> from);

  // Adds a copy to a list; what continues the last one on both sides becomes a part of it.
  static void Append(std::vector<kernels::CopyOp>& ops, const kernels::CopyOp& op);

  void CheckInvariants() const;  // aborts on a broken one

 private:
  // Of one rank.
  struct Part {
    std::map<int32_t, int32_t> free_runs;  // first page → length
    int64_t num_free = 0;
  };
  // Copies of one rank's pages.
  using RankOps = std::vector<std::vector<kernels::CopyOp>>;
  RankOps OpsByRank() const { return RankOps(backends_.size()); }

  void TakeLocked(Part& part, int64_t count, std::vector<int32_t>& pages);
  void FreeRunLocked(int32_t first, int32_t count);
  int64_t NumFreeLocked() const;
  bool HasFreeLocked(std::span<const int64_t> counts) const;
  absl::Status Copy(kernels::CopyKind kind, const RankOps& ops) const;

  const KvPartitions view_;
  const std::vector<const kernels::Backend*> backends_;
  mutable std::mutex mutex_;     // guards all below
  std::vector<int32_t> owners_;  // [num_pages]
  std::vector<Part> parts_;
};

}  // namespace spl::engine
