#include "services/engine/cache/spare_pages.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

size_t RankOf(const KvShape& shape, size_t num_ranks, int32_t stream) {
  return static_cast<size_t>(stream % shape.num_kv_heads) / (static_cast<size_t>(shape.num_kv_heads) / num_ranks);
}

}  // namespace

int64_t SpareNeed::num_lists() const { return std::accumulate(lists_of_rank.begin(), lists_of_rank.end(), int64_t{0}); }

SpareNeed SparesFor(const KvShape& shape, const StreamClasses& classes, int num_ranks, int64_t num_tokens,
                    double share) {
  SpareNeed need{.lists_of_rank = std::vector<int32_t>(static_cast<size_t>(num_ranks))};
  int32_t num_local = 0;
  for (int32_t s = 0; s < shape.num_streams(); ++s) {
    const HeadClass& head = classes[s];
    num_local += head.is_global ? 0 : 1;
    const int32_t hole = HoleOf(head, num_tokens).size();
    need.pages_per_list = std::max(need.pages_per_list, hole);
    if (hole > 0) ++need.lists_of_rank[RankOf(shape, need.lists_of_rank.size(), s)];
  }
  const auto most = static_cast<int32_t>(std::ceil(std::min(share, 1.0) * num_local));
  for (int32_t& lists : need.lists_of_rank) lists = std::min(lists, most);
  return need;
}

absl::StatusOr<std::vector<int32_t>> AssignSpares(const KvShape& shape, const StreamClasses& classes,
                                                  int64_t num_tokens, std::span<const int32_t> lists_of_rank,
                                                  std::span<const int32_t> restored) {
  std::vector<int32_t> next(lists_of_rank.size()), end(lists_of_rank.size());
  int32_t lists = 0;
  for (size_t r = 0; r < lists_of_rank.size(); ++r) {
    next[r] = lists;
    end[r] = lists += lists_of_rank[r];
  }
  std::vector<int32_t> assigned;
  for (size_t i = 0; i < restored.size(); ++i) {
    const int32_t stream = restored[i];
    if (stream < 0 || stream >= shape.num_streams() || (i > 0 && stream <= restored[i - 1]) ||
        classes[stream].is_global)
      return InvalidArgument("restored heads: {} is not the next local head of {} layers with {} KV heads", stream,
                             shape.num_layers, shape.num_kv_heads);
    if (HoleOf(classes[stream], num_tokens).size() == 0) {
      assigned.push_back(-1);
      continue;
    }
    const size_t rank = next.empty() ? 0 : RankOf(shape, next.size(), stream);
    if (next.empty() || next[rank] == end[rank])
      return InvalidArgument("{} heads were restored, more than there is spare room for ({} lists)", restored.size(),
                             lists);
    assigned.push_back(next[rank]++);
  }
  return assigned;
}

absl::StatusOr<std::unique_ptr<SparePages>> SparePages::Reserve(PagePool& pool, const SpareNeed& need) {
  auto spares = std::unique_ptr<SparePages>(new SparePages(pool, need));
  std::vector<int64_t> counts;
  for (const int32_t lists : need.lists_of_rank) counts.push_back(int64_t{lists} * need.pages_per_list);
  if (pool.view().num_ranks() == 1) counts = {need.num_pages()};
  SPLICE_RETURN_IF_ERROR(pool.AllocateByRank(counts, spares->pages_));
  return spares;
}

SparePages::~SparePages() { pool_.Release(pages_); }

std::vector<int32_t> SparePages::Take(int32_t list, int32_t count) {
  SPLICE_CHECK(count <= need_.pages_per_list, "a hole that is larger than its spare list");
  const auto first = pages_.begin() + static_cast<std::ptrdiff_t>(list) * need_.pages_per_list;
  std::vector<int32_t> taken(first, first + count);
  std::fill(first, first + count, kernels::kNoPage);
  return taken;
}

}  // namespace spl::engine
