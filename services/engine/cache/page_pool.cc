#include "services/engine/cache/page_pool.h"

#include <algorithm>
#include <cstring>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

PagePool::PagePool(const kernels::KvPoolView& view, const kernels::Backend* backend)
    : view_(view), backend_(backend), owners_(view.num_pages, 0), num_free_(view.num_pages) {
  if (view.num_pages > 0) free_runs_[0] = view.num_pages;
}

absl::Status PagePool::Allocate(int64_t count, std::vector<int32_t>& pages) {
  pages.clear();
  if (count == 0) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  if (count > num_free_)
    return Errorf(absl::StatusCode::kResourceExhausted, "KV pool: {} pages asked for, {} of {} are free", count,
                  num_free_, view_.num_pages);
  pages.reserve(count);
  // The first run that holds everything, else runs in ascending order until it is enough.
  auto run = std::find_if(free_runs_.begin(), free_runs_.end(), [&](const auto& r) { return r.second >= count; });
  if (run == free_runs_.end()) run = free_runs_.begin();
  while (static_cast<int64_t>(pages.size()) < count) {
    const auto [first, length] = *run;
    const int32_t take = static_cast<int32_t>(std::min<int64_t>(length, count - static_cast<int64_t>(pages.size())));
    for (int32_t page = first; page < first + take; ++page) {
      pages.push_back(page);
      owners_[page] = 1;
    }
    run = free_runs_.erase(run);
    if (take < length) run = free_runs_.emplace_hint(run, first + take, length - take);
  }
  num_free_ -= count;
  return absl::OkStatus();
}

absl::Status PagePool::Copy(kernels::CopyKind kind, std::span<const kernels::CopyOp> ops) const {
  if (backend_ != nullptr) return backend_->Copy(kind, ops);
  for (const kernels::CopyOp& op : ops) std::memcpy(op.to, op.from, op.bytes);
  return absl::OkStatus();
}

absl::Status PagePool::ReadPages(std::span<const int32_t> pages, std::byte* out) const {
  std::vector<kernels::CopyOp> ops;
  for (size_t i = 0; i < pages.size(); ++i)
    ops.push_back({out + i * view_.page_bytes(), view_.k(pages[i]), view_.page_bytes()});
  return Copy(kernels::CopyKind::kDownload, ops);
}

absl::Status PagePool::ReadPagesTo(std::span<const int32_t> pages, std::span<std::byte* const> out) const {
  std::vector<kernels::CopyOp> ops;
  for (size_t i = 0; i < pages.size(); ++i) ops.push_back({out[i], view_.k(pages[i]), view_.page_bytes()});
  return Copy(kernels::CopyKind::kDownload, ops);
}

absl::Status PagePool::WritePagesFrom(std::span<const int32_t> pages, std::span<const std::byte* const> in) {
  std::vector<kernels::CopyOp> ops;
  for (size_t i = 0; i < pages.size(); ++i) ops.push_back({view_.k(pages[i]), in[i], view_.page_bytes()});
  return Copy(kernels::CopyKind::kUpload, ops);
}

absl::Status PagePool::WritePages(std::span<const int32_t> pages, const std::byte* in) {
  std::vector<kernels::CopyOp> ops;
  for (size_t i = 0; i < pages.size(); ++i)
    ops.push_back({view_.k(pages[i]), in + i * view_.page_bytes(), view_.page_bytes()});
  return Copy(kernels::CopyKind::kUpload, ops);
}

absl::Status PagePool::ChecksumPages(std::span<const int32_t> pages, uint32_t* out) const {
  if (backend_ != nullptr) return backend_->PageChecksums(view_, pages, out);
  for (size_t i = 0; i < pages.size(); ++i) out[i] = kernels::Crc32cExtend(0, view_.k(pages[i]), view_.page_bytes());
  return absl::OkStatus();
}

absl::Status PagePool::CopyPages(std::span<const int32_t> to, std::span<const int32_t> from) {
  std::vector<kernels::CopyOp> ops;
  for (size_t i = 0; i < to.size(); ++i) ops.push_back({view_.k(to[i]), view_.k(from[i]), view_.page_bytes()});
  return Copy(kernels::CopyKind::kWithin, ops);
}

void PagePool::Share(std::span<const int32_t> pages) {
  std::lock_guard lock(mutex_);
  for (int32_t page : pages) {
    SPLICE_CHECK(owners_[page] > 0, "sharing a free page");
    ++owners_[page];
  }
}

void PagePool::Release(std::span<const int32_t> pages) {
  std::lock_guard lock(mutex_);
  // Neighbours are freed as one run: a sequence's pages mostly are neighbours.
  int32_t first = 0, count = 0;
  for (int32_t page : pages) {
    SPLICE_CHECK(owners_[page] > 0, "releasing a free page");
    if (--owners_[page] > 0) continue;
    if (count > 0 && page == first + count) {
      ++count;
      continue;
    }
    if (count > 0) FreeRunLocked(first, count);
    first = page;
    count = 1;
  }
  if (count > 0) FreeRunLocked(first, count);
}

void PagePool::FreeRunLocked(int32_t first, int32_t count) {
  num_free_ += count;
  auto next = free_runs_.lower_bound(first);
  if (next != free_runs_.end() && next->first == first + count) {
    count += next->second;
    next = free_runs_.erase(next);
  }
  if (next != free_runs_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == first) {
      previous->second += count;
      return;
    }
  }
  free_runs_.emplace_hint(next, first, count);
}

int32_t PagePool::owners(int32_t page) const {
  std::lock_guard lock(mutex_);
  return owners_[page];
}

int64_t PagePool::num_free() const {
  std::lock_guard lock(mutex_);
  return num_free_;
}

void PagePool::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  int64_t free_pages = 0;
  int32_t last_end = -1;
  for (const auto& [first, length] : free_runs_) {
    SPLICE_CHECK(length > 0 && first > last_end, "free runs are not disjoint and maximal");
    for (int32_t page = first; page < first + length; ++page)
      SPLICE_CHECK(owners_[page] == 0, "a free page has owners");
    free_pages += length;
    last_end = first + length;
  }
  SPLICE_CHECK(free_pages == num_free_, "free runs do not sum to num_free");
  const int64_t owned = std::count_if(owners_.begin(), owners_.end(), [](int32_t n) { return n > 0; });
  SPLICE_CHECK(owned + free_pages == view_.num_pages, "a page is neither free nor owned");
}

}  // namespace spl::engine
