#include "services/engine/cache/compact_pages.h"

#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

int32_t PagesOfStream(const CompactPages::Needs& needs, int64_t num_tokens) {
  if (needs.page_tokens == 0) return static_cast<int32_t>(needs.fixed_pages);
  return static_cast<int32_t>(needs.fixed_pages + (num_tokens + needs.page_tokens - 1) / needs.page_tokens);
}

// Of the streams with compact pages, how many each rank has.
std::vector<int64_t> StreamsOfRank(const KvShape& shape, const CompactPages::Needs& needs, int num_ranks) {
  std::vector<int64_t> counts(static_cast<size_t>(num_ranks));
  const std::vector<int32_t> order = StreamsByRank(shape, num_ranks);
  const size_t per_rank = order.size() / counts.size();
  for (size_t i = 0; i < order.size(); ++i) counts[i / per_rank] += needs.streams[static_cast<size_t>(order[i])];
  return counts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CompactPages>> CompactPages::Create(PagePool& pool, const KvShape& shape, Needs needs,
                                                                   std::span<const kernels::Backend* const> backends) {
  SPLICE_CHECK(
      needs.page_tokens + needs.fixed_pages > 0 && static_cast<int32_t>(needs.streams.size()) == shape.num_streams(),
      "compact pages of this model");
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
  for (const std::vector<int32_t>& table : tables_) pool_.Release(table);
}

std::vector<int64_t> CompactPages::PagesByRank(const KvShape& shape, const Needs& needs, int num_ranks,
                                               int64_t num_tokens) {
  std::vector<int64_t> counts = StreamsOfRank(shape, needs, num_ranks);
  for (int64_t& count : counts) count *= PagesOfStream(needs, num_tokens);
  return counts;
}

absl::Status CompactPages::Reserve(int64_t num_tokens) {
  const int32_t wanted = PagesOfStream(needs_, num_tokens), more = wanted - pages_per_stream_;
  if (more <= 0) return absl::OkStatus();
  const int num_ranks = pool_.view().num_ranks();
  std::vector<int64_t> counts = StreamsOfRank(shape_, needs_, num_ranks);
  for (int64_t& count : counts) count *= more;
  std::vector<int32_t> pages;
  SPLICE_RETURN_IF_ERROR(pool_.AllocateByRank(counts, pages));
  auto next = pages.begin();
  for (const int32_t stream : StreamsByRank(shape_, num_ranks)) {
    if (!needs_.streams[static_cast<size_t>(stream)]) continue;
    std::vector<int32_t>& table = tables_[static_cast<size_t>(stream)];
    table.insert(table.end(), next, next + more);
    next += more;
  }
  pages_per_stream_ = wanted;
  return absl::OkStatus();
}

}  // namespace spl::engine
