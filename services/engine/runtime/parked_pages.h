// The pages (blocks) of a preempted sequence, in host memory until there is room again. The same bytes come back, and
// therefore the same tokens. Pages that its continuations share are kept once, and shared again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/hot_buffer.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Everything in one sequence that has pages of a pool. Entries may be null.
struct PageHolders {
  std::vector<SequenceKv*> kv;
  std::vector<CompactPages*> compact;
  std::vector<HotBuffer*> hot;

  // The distinct pages, rank by rank.
  std::vector<int32_t> Pages(const PagePool& pool) const;
  std::vector<int64_t> PagesByRank(const PagePool& pool) const;
};

class ParkedPages {
 public:
  // Copies the pages to the host and gives them back to the pool. ResourceExhausted: no host memory; nothing has
  // changed. Other errors are those of copies. REQUIRES: no pass uses the pages.
  static absl::StatusOr<std::unique_ptr<ParkedPages>> Park(PagePool& pool, const PageHolders& holders);
  // Allocates pages and copies the contents back, if `spare` more pages of each rank are free, too. ResourceExhausted:
  // they are not, and nothing has changed. Other errors are those of copies, after which the sequence must end.
  // REQUIRES: the same holders.
  absl::Status Return(const PageHolders& holders, std::span<const int64_t> spare);
  size_t bytes() const { return pages_.size() * pool_.view().page_bytes(); }

 private:
  ParkedPages(PagePool& pool, std::vector<int32_t> pages) : pool_(pool), pages_(std::move(pages)) {}

  PagePool& pool_;
  const std::vector<int32_t> pages_;  // that were given back, in the order of PageHolders::Pages
  std::unique_ptr<std::byte[]> contents_;
};

}  // namespace spl::engine
