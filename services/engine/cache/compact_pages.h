// What a sequence that chooses tokens while it decodes keeps beside its KV: compact pages, out of the same pool, with
// lists of positions and parts or bounds of its keys, and on each rank's device the dimensions that were chosen.
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

// Owns its pages. One thread at a time; may be destroyed on any, once no pass uses it.
class CompactPages {
 public:
  struct Needs {
    int32_t page_tokens = 0;    // positions that a page stands for; 0: pages do not follow the length
    int64_t left_out = 0;       // of the positions so many are not there, and no page stands for them
    int64_t fixed_pages = 0;    // of a stream, whatever the length
    int32_t num_dims = 0;       // of the tables of dimensions; 0: there are none
    std::vector<bool> streams;  // [num_streams]: which have these pages
    // Pages in front of those, with the positions that a stream may choose from (kernels/selection/candidates.h).
    int64_t list_pages = 0;
    std::vector<bool> lists;  // [num_streams]: which have such; with list_pages > 0 all that have others
  };
  // `backends`: of the ranks. Unavailable, ResourceExhausted: no device memory for the tables (4 num_dims num_streams
  // bytes, twice).
  static absl::StatusOr<std::unique_ptr<CompactPages>> Create(PagePool& pool, const KvShape& shape, Needs needs,
                                                              std::span<const kernels::Backend* const> backends);
  ~CompactPages();
  CompactPages(const CompactPages&) = delete;
  CompactPages& operator=(const CompactPages&) = delete;

  // Pages for `num_tokens` positions in every stream that has any. All or nothing: ResourceExhausted.
  absl::Status Reserve(int64_t num_tokens);
  // From here on the pages are those of `needs`, for `num_tokens` positions; what was written to them is lost. Pages go
  // from stream to stream, and only what is over or missing to or from the pool: what was reserved before it was known
  // what a sequence leaves out is turned into what it needs. All or nothing: ResourceExhausted. REQUIRES: as many
  // dimensions as before, and no pass uses the pages.
  absl::Status Become(Needs needs, int64_t num_tokens);
  // As SequenceKv's: gives the pages back, and gets others for them later. Tables of dimensions stay.
  void Evict();
  void Refill(const std::unordered_map<int32_t, int32_t>& pages);
  static std::vector<int64_t> PagesByRank(const KvShape& shape, const Needs& needs, int num_ranks, int64_t num_tokens);

  // [num_layers * num_kv_heads] page lists; the first needs().list_pages of each are for its list.
  std::span<const std::vector<int32_t>> tables() const { return tables_; }
  // Device memory of the rank: [num_layers, its heads, 2, num_dims]; null without dimensions.
  int32_t* dims(int rank) const {
    return dims_.empty() ? nullptr : static_cast<int32_t*>(dims_[static_cast<size_t>(rank)]->data());
  }
  const Needs& needs() const { return needs_; }

 private:
  CompactPages(PagePool& pool, const KvShape& shape, Needs needs)
      : pool_(pool), shape_(shape), needs_(std::move(needs)), tables_(static_cast<size_t>(shape.num_streams())) {}

  PagePool& pool_;
  const KvShape shape_;
  Needs needs_;
  int64_t own_pages_ = 0;  // behind its list, of a stream that has any
  bool reserved_ = false;  // lists have their pages
  bool evicted_ = false;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::unique_ptr<kernels::Buffer>> dims_;  // [num_ranks], or empty
};

}  // namespace spl::engine
