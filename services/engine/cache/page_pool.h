// Bookkeeping of KV pages: which are free, and how many owners the others have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/common/backend.h"
#include "kernels/common/kv_pool.h"

namespace spl::engine {

// Hands out pages of a memory region that somebody else owns (a backend buffer or registered transport memory; it must
// outlive the pool). Any thread may call: reservations come from RPC threads, growth from the engine thread.
// Invariants: a page is free or has owners, never both; free runs are disjoint, maximal and sum to num_free().
class PagePool {
 public:
  // `backend` copies what the host cannot reach itself; null: the view is host memory. Borrowed.
  explicit PagePool(const kernels::KvPoolView& view, const kernels::Backend* backend = nullptr);

  // `count` pages with one owner each, or none at all (ResourceExhausted with both numbers). Pages come in ascending
  // runs, one single run when the pool has it: neighbours travel in one transfer.
  absl::Status Allocate(int64_t count, std::vector<int32_t>& pages);
  void Share(std::span<const int32_t> pages);    // one more owner each
  void Release(std::span<const int32_t> pages);  // one owner less each; a page without owners is free
  int32_t owners(int32_t page) const;

  int64_t num_free() const;
  int64_t num_pages() const { return view_.num_pages; }
  const kernels::KvPoolView& view() const { return view_; }

  // Contents, complete on return; the caller holds a share of the pages and no pass is writing them.
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) const;  // [pages.size()] pages, contiguous
  absl::Status ReadPagesTo(std::span<const int32_t> pages, std::span<std::byte* const> out) const;  // a place for each
  absl::Status WritePagesFrom(std::span<const int32_t> pages, std::span<const std::byte* const> in);
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in);
  absl::Status ChecksumPages(std::span<const int32_t> pages, uint32_t* out) const;  // CRC32C of each
  bool host_memory() const { return backend_ == nullptr || backend_->host_memory(); }
  absl::Status CopyPages(std::span<const int32_t> to, std::span<const int32_t> from);

  void CheckInvariants() const;  // aborts on a broken one

 private:
  void FreeRunLocked(int32_t first, int32_t count);

  absl::Status Copy(kernels::CopyKind kind, std::span<const kernels::CopyOp> ops) const;

  const kernels::KvPoolView view_;
  const kernels::Backend* const backend_;
  mutable std::mutex mutex_;              // guards all below
  std::vector<int32_t> owners_;           // [num_pages]
  std::map<int32_t, int32_t> free_runs_;  // first page → length
  int64_t num_free_ = 0;
};

}  // namespace spl::engine
