// Spare pages: room for local heads that turn out to need their whole context while a prompt is computed
// (docs/methods/redknot.md, "Restore"). Pages for their holes are reserved in addition to a sequence with head classes,
// and given back if they are not needed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Number of heads that may be restored, and pages that each of them lacks. The spare pages are lists, one per head.
struct SpareNeed {
  std::vector<int32_t> lists_of_rank;  // [num_ranks]: number of lists; any local head of the rank may take one of them
  int32_t pages_per_list = 0;          // the largest hole

  int64_t num_lists() const;
  int64_t num_pages() const { return num_lists() * pages_per_list; }
};
// Each rank gets ceil(share of all local heads) lists, but at most one per local head of it that has a hole: all
// restored heads may be on one rank.
SpareNeed SparesFor(const KvShape& shape, const StreamClasses& classes, int num_ranks, int64_t num_tokens,
                    double share);

// Number of the list that each restored head (a stream number) takes; -1: it has no hole. Lists are numbered rank by
// rank; heads take those of their rank in ascending order. InvalidArgument: `restored` is not ascending, has a head
// that is not local, or has more heads than there are lists.
absl::StatusOr<std::vector<int32_t>> AssignSpares(const KvShape& shape, const StreamClasses& classes,
                                                  int64_t num_tokens, std::span<const int32_t> lists_of_rank,
                                                  std::span<const int32_t> restored);

// Owns the pages of the lists until they are taken. One thread at a time; any thread may destroy it.
class SparePages {
 public:
  // Takes the pages of each rank's lists from that rank; a pool with one rank gives all of them. ResourceExhausted:
  // there are too few free pages.
  static absl::StatusOr<std::unique_ptr<SparePages>> Reserve(PagePool& pool, const SpareNeed& need);
  ~SparePages();
  SparePages(const SparePages&) = delete;
  SparePages& operator=(const SparePages&) = delete;

  const SpareNeed& need() const { return need_; }
  // [list][page]; kNoPage: taken.
  std::span<const int32_t> pages() const { return pages_; }
  // Takes the first `count` pages of a list; the caller owns them from now on.
  std::vector<int32_t> Take(int32_t list, int32_t count);

 private:
  SparePages(PagePool& pool, const SpareNeed& need) : pool_(pool), need_(need) {}

  PagePool& pool_;
  const SpareNeed need_;
  std::vector<int32_t> pages_;
};

}  // namespace spl::engine
