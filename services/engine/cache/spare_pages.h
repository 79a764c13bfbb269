// Room for heads that turn out to need their whole context while a prompt is computed (docs/methods/redknot.md,
// "Restore"): what their holes leave out is reserved beside a sequence with head classes, and given back when it is not
// needed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// How many heads may be restored and what each of them lacks.
struct SpareNeed {
  std::vector<int32_t> lists_of_rank;  // [num_ranks]; any of a rank's local heads may take one of its lists
  int32_t pages_per_list = 0;          // the largest hole

  int64_t num_lists() const;
  int64_t num_pages() const { return num_lists() * pages_per_list; }
};
// ceil(share of the local heads), but no more of a rank than it has: all of them may be of one rank.
SpareNeed SparesFor(const KvShape& shape, const StreamClasses& classes, int num_ranks, int64_t num_tokens,
                    double share);

// Which list each of the restored heads (numbers of streams) takes, -1: it has no hole. Lists are counted rank by rank;
// heads take those of their rank in ascending order. InvalidArgument: not ascending, no local head, or more than there
// are lists.
absl::StatusOr<std::vector<int32_t>> AssignSpares(const KvShape& shape, const StreamClasses& classes,
                                                  int64_t num_tokens, std::span<const int32_t> lists_of_rank,
                                                  std::span<const int32_t> restored);

// Owns the pages of the lists until they are taken. One thread at a time; may be destroyed on any.
class SparePages {
 public:
  // Of each rank its lists; a pool with one rank gives all of them. ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<SparePages>> Reserve(PagePool& pool, const SpareNeed& need);
  ~SparePages();
  SparePages(const SparePages&) = delete;
  SparePages& operator=(const SparePages&) = delete;

  const SpareNeed& need() const { return need_; }
  // [list][page]; kNoPage where taken.
  std::span<const int32_t> pages() const { return pages_; }
  // The first `count` pages of a list; the caller has their shares from now on.
  std::vector<int32_t> Take(int32_t list, int32_t count);

 private:
  SparePages(PagePool& pool, const SpareNeed& need) : pool_(pool), need_(need) {}

  PagePool& pool_;
  const SpareNeed need_;
  std::vector<int32_t> pages_;
};

}  // namespace spl::engine
