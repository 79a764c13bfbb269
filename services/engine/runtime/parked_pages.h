// The pages of a sequence that gave way to others, in host memory until there is room again: the same bytes come back,
// and so the same tokens. Pages that its continuations share are kept once, and shared again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Everything of one sequence that has pages of a pool; entries may be null.
struct PageHolders {
  std::vector<SequenceKv*> kv;
  std::vector<CompactPages*> compact;

  // The different pages, rank by rank, each once.
  std::vector<int32_t> Pages(const PagePool& pool) const;
  std::vector<int64_t> PagesByRank(const PagePool& pool) const;
};

class ParkedPages {
 public:
  // Copies the pages and gives them back. Errors are those of copies, or ResourceExhausted: no host memory; nothing has
  // changed then. REQUIRES: no pass uses the pages.
  static absl::StatusOr<std::unique_ptr<ParkedPages>> Park(PagePool& pool, const PageHolders& holders);
  // The other way round, where so many pages of each rank, too, are free. ResourceExhausted: they are not, and nothing
  // has changed; other errors are those of copies. REQUIRES: the same holders.
  absl::Status Return(const PageHolders& holders, std::span<const int64_t> spare);
  size_t bytes() const { return pages_.size() * pool_.view().page_bytes(); }

 private:
  ParkedPages(PagePool& pool, std::vector<int32_t> pages) : pool_(pool), pages_(std::move(pages)) {}

  PagePool& pool_;
  const std::vector<int32_t> pages_;  // that were given back, as PageHolders::Pages
  std::unique_ptr<std::byte[]> contents_;
};

}  // namespace spl::engine
