#include "services/engine/cache/compact_pages.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

// Number of pages behind the list, of a stream that has such pages.
int64_t OwnPages(const CompactPages::Needs& needs, int64_t num_tokens) {
  if (needs.page_tokens == 0) return needs.fixed_pages;
  const int64_t tokens = std::max<int64_t>(num_tokens - needs.left_out, 0);
  return needs.fixed_pages + (tokens + needs.page_tokens - 1) / needs.page_tokens;
}

int64_t PagesOf(const CompactPages::Needs& needs, size_t stream, int64_t own_pages) {
  const bool lists = needs.list_pages > 0 && needs.lists[stream];
  return (lists ? needs.list_pages : 0) + (needs.streams[stream] ? own_pages : 0);
}

void CheckNeeds(const CompactPages::Needs& needs, const KvShape& shape) {
  const auto num_streams = static_cast<size_t>(shape.num_streams());
  SPLICE_CHECK(needs.page_tokens + needs.fixed_pages + needs.list_pages > 0 && needs.streams.size() == num_streams &&
                   (needs.list_pages == 0 || needs.lists.size() == num_streams),
               "compact pages of this model");
  for (size_t s = 0; s < num_streams && needs.list_pages > 0; ++s)
    SPLICE_CHECK(needs.lists[s] || !needs.streams[s], "lists in front of all other pages, or of none");
}

}  // namespace

absl::StatusOr<std::unique_ptr<CompactPages>> CompactPages::Create(PagePool& pool, const KvShape& shape, Needs needs,
                                                                   std::span<const kernels::Backend* const> backends) {
  CheckNeeds(needs, shape);
  auto made = std::unique_ptr<CompactPages>(new CompactPages(pool, shape, std::move(needs)));
  if (made->needs_.num_dims == 0) return made;
  const size_t bytes = sizeof(int32_t) * 2 * static_cast<size_t>(made->needs_.num_dims) *
                       static_cast<size_t>(shape.num_streams()) / backends.size();
  for (const kernels::Backend* backend : backends) {
    SPLICE_ASSIGN_OR_RETURN(made->dims_.emplace_back(), backend->Allocate(bytes));
  }
  return made;
}

CompactPages::~CompactPages() {
  for (const std::vector<int32_t>& table : tables_) {
    if (!evicted_) pool_.Release(table);
  }
}

void CompactPages::Evict() {
  SPLICE_CHECK(!evicted_, "compact pages that are there");
  for (const std::vector<int32_t>& table : tables_) pool_.Release(table);
  evicted_ = true;
}

void CompactPages::Refill(const std::unordered_map<int32_t, int32_t>& pages) {
  SPLICE_CHECK(evicted_, "compact pages that were given back");
  for (std::vector<int32_t>& table : tables_) {
    for (int32_t& page : table) page = pages.at(page);
  }
  evicted_ = false;
}

std::vector<int64_t> CompactPages::PagesByRank(const KvShape& shape, const Needs& needs, int num_ranks,
                                               int64_t num_tokens) {
  std::vector<int64_t> counts(num_ranks);
  const std::vector<int32_t> order = StreamsByRank(shape, num_ranks);
  const size_t per_rank = order.size() / counts.size();
  for (size_t i = 0; i < order.size(); ++i)
    counts[i / per_rank] += PagesOf(needs, static_cast<size_t>(order[i]), OwnPages(needs, num_tokens));
  return counts;
}

absl::Status CompactPages::Reserve(int64_t num_tokens) {
  const int64_t own = OwnPages(needs_, num_tokens);
  if (reserved_ && own <= own_pages_) return absl::OkStatus();
  const int num_ranks = pool_.view().num_ranks();
  const std::vector<int32_t> order = StreamsByRank(shape_, num_ranks);
  const size_t per_rank = order.size() / static_cast<size_t>(num_ranks);
  std::vector<int64_t> counts(num_ranks);
  const auto missing = [&](int32_t stream) {
    const auto s = static_cast<size_t>(stream);
    return PagesOf(needs_, s, own) - static_cast<int64_t>(tables_[s].size());
  };
  for (size_t i = 0; i < order.size(); ++i) counts[i / per_rank] += missing(order[i]);
  std::vector<int32_t> pages;
  SPLICE_RETURN_IF_ERROR(pool_.AllocateByRank(counts, pages));
  auto next = pages.begin();
  for (const int32_t stream : order) {
    const int64_t more = missing(stream);
    std::vector<int32_t>& table = tables_[stream];
    table.insert(table.end(), next, next + more);
    next += more;
  }
  own_pages_ = own;
  reserved_ = true;
  return absl::OkStatus();
}

absl::Status CompactPages::Become(Needs needs, int64_t num_tokens) {
  CheckNeeds(needs, shape_);
  SPLICE_CHECK(needs.num_dims == needs_.num_dims, "as many dimensions as before");
  const int num_ranks = pool_.view().num_ranks();
  const std::vector<int32_t> order = StreamsByRank(shape_, num_ranks);
  const size_t per_rank = order.size() / static_cast<size_t>(num_ranks);
  std::vector<std::vector<int32_t>> of_rank(num_ranks);
  for (size_t i = 0; i < order.size(); ++i) {
    const std::vector<int32_t>& table = tables_[order[i]];
    of_rank[i / per_rank].insert(of_rank[i / per_rank].end(), table.begin(), table.end());
  }
  const std::vector<int64_t> wanted = PagesByRank(shape_, needs, num_ranks, num_tokens);
  std::vector<int64_t> missing;
  for (size_t r = 0; r < wanted.size(); ++r)
    missing.push_back(std::max<int64_t>(wanted[r] - static_cast<int64_t>(of_rank[r].size()), 0));
  std::vector<int32_t> more;
  SPLICE_RETURN_IF_ERROR(pool_.AllocateByRank(missing, more));
  auto from = more.begin();
  for (size_t r = 0; r < wanted.size(); ++r) {
    of_rank[r].insert(of_rank[r].end(), from, from + missing[r]);
    from += missing[r];
    pool_.Release(std::span(of_rank[r]).subspan(wanted[r]));
  }
  needs_ = std::move(needs);
  own_pages_ = OwnPages(needs_, num_tokens);
  reserved_ = true;
  std::vector<size_t> taken(of_rank.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto s = static_cast<size_t>(order[i]);
    const size_t r = i / per_rank, count = static_cast<size_t>(PagesOf(needs_, s, own_pages_));
    const auto begin = of_rank[r].begin() + static_cast<std::ptrdiff_t>(taken[r]);
    tables_[s].assign(begin, begin + static_cast<std::ptrdiff_t>(count));
    taken[r] += count;
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
