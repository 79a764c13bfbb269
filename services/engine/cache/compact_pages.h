// Data that a sequence keeps besides its KV if it chooses tokens while it decodes. Compact pages, from the same pool,
// hold lists of positions, and parts or bounds of its keys. Tables on each rank's device hold the chosen dimensions.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Owns its pages. One thread at a time; any thread may destroy it, once no pass uses it.
class CompactPages {
 public:
  struct Needs {
    int32_t page_tokens = 0;    // positions per page; 0: the number of pages does not depend on the length
    int64_t left_out = 0;       // number of positions that were left out, which need no pages
    int64_t fixed_pages = 0;    // pages of a stream that do not depend on the length
    int32_t num_dims = 0;       // dimensions in each table; 0: there are no tables
    std::vector<bool> streams;  // [num_streams]: streams that have these pages
    // Pages in front of these, with the list of positions that a stream may choose from
    // (kernels/selection/candidates.h).
    int64_t list_pages = 0;
    std::vector<bool> lists;  // [num_streams]: streams with a list; if list_pages > 0, includes all of `streams`
  };
  // Allocates the tables of dimensions (4 num_dims num_streams bytes, twice), but no pages. `backends`: [num_ranks].
  // Unavailable, ResourceExhausted: there is no device memory for them.
  static absl::StatusOr<std::unique_ptr<CompactPages>> Create(PagePool& pool, const KvShape& shape, Needs needs,
                                                              std::span<const kernels::Backend* const> backends);
  ~CompactPages();
  CompactPages(const CompactPages&) = delete;
  CompactPages& operator=(const CompactPages&) = delete;

  // Takes pages for `num_tokens` positions in every stream that has compact pages. All or nothing: ResourceExhausted.
  absl::Status Reserve(int64_t num_tokens);
  // Turns the pages into those of `needs`, for `num_tokens` positions; their contents are lost. Used when pages were
  // reserved before it was known which tokens the sequence leaves out. Pages are redistributed between the streams;
  // only a surplus goes to the pool, and only missing ones come from it. All or nothing: ResourceExhausted. REQUIRES:
  // the same number of dimensions, and no pass uses the pages.
  absl::Status Become(Needs needs, int64_t num_tokens);
  // Like SequenceKv's: Evict gives the pages back, Refill gets others in their place. The tables of dimensions stay.
  void Evict();
  void Refill(const std::unordered_map<int32_t, int32_t>& pages);
  static std::vector<int64_t> PagesByRank(const KvShape& shape, const Needs& needs, int num_ranks, int64_t num_tokens);

  // [num_layers * num_kv_heads] lists of pages. The first needs().list_pages of a stream with a list are for that list.
  std::span<const std::vector<int32_t>> tables() const { return tables_; }
  // The rank's tables in device memory, [num_layers, its heads, 2, num_dims]; null: there are no dimensions.
  int32_t* dims(int rank) const { return dims_.empty() ? nullptr : static_cast<int32_t*>(dims_[rank]->data()); }
  const Needs& needs() const { return needs_; }

 private:
  CompactPages(PagePool& pool, const KvShape& shape, Needs needs)
      : pool_(pool), shape_(shape), needs_(std::move(needs)), tables_(shape.num_streams()) {}

  PagePool& pool_;
  const KvShape shape_;
  Needs needs_;
  int64_t own_pages_ = 0;  // pages behind the list, of a stream that has any
  bool reserved_ = false;  // pages of the lists have been taken
  bool evicted_ = false;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::unique_ptr<kernels::Buffer>> dims_;  // [num_ranks], or empty
};

}  // namespace spl::engine
