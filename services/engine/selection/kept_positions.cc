#include "services/engine/selection/kept_positions.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

absl::Status WriteKeptPositions(const Model& model, PagePool& pool, const KeptPositions& kept,
                                const CompactPages& compact) {
  const size_t page_entries = model.page_bytes() / sizeof(int32_t);
  std::vector<std::vector<int32_t>> entries(kept.size());  // per stream: the number of positions, then the positions
  std::vector<std::vector<kernels::CopyOp>> ops(model.num_ranks());
  for (size_t stream = 0; stream < kept.size(); ++stream) {
    if (compact.needs().list_pages == 0 || !compact.needs().lists[stream]) continue;
    const auto pages = std::span(compact.tables()[stream]).first(compact.needs().list_pages);
    std::vector<int32_t>& of_stream = entries[stream];
    of_stream.push_back(static_cast<int32_t>(kept[stream].size()));
    of_stream.insert(of_stream.end(), kept[stream].begin(), kept[stream].end());
    SPLICE_CHECK(of_stream.size() <= pages.size() * page_entries, "room for the list");
    for (size_t at = 0, page = 0; at < of_stream.size(); at += page_entries, ++page) {
      const size_t count = std::min(page_entries, of_stream.size() - at);
      ops[pool.view().rank_of(pages[page])].push_back(
          {pool.view().k(pages[page]), &of_stream[at], count * sizeof(int32_t)});
    }
  }
  for (int r = 0; r < model.num_ranks(); ++r)
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kUpload, ops[r]));
  return absl::OkStatus();
}

absl::Status BeginLists(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                        CompactPages* compact) {
  const KeptPositions lists = selector.lists();
  if (lists.empty()) return absl::OkStatus();
  SPLICE_CHECK(compact != nullptr, "a selector with lists has compact pages");
  SPLICE_RETURN_IF_ERROR(compact->Reserve(num_tokens + 1));
  return WriteKeptPositions(model, pool, lists, *compact);
}

}  // namespace spl::engine
