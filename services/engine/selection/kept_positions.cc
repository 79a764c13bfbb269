#include "services/engine/selection/kept_positions.h"

#include <algorithm>
#include <bit>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

namespace {

// Copies words to pages of each stream: entries[i] to those of `pages[i]`, from the first one on.
absl::Status WriteWords(const Model& model, PagePool& pool, const std::vector<std::vector<int32_t>>& entries,
                        const std::vector<std::span<const int32_t>>& pages) {
  const size_t page_entries = model.page_bytes() / sizeof(int32_t);
  std::vector<std::vector<kernels::CopyOp>> ops(model.num_ranks());
  for (size_t stream = 0; stream < entries.size(); ++stream) {
    const std::vector<int32_t>& words = entries[stream];
    SPLICE_CHECK(words.size() <= pages[stream].size() * page_entries, "room for the list");
    for (size_t at = 0, page = 0; at < words.size(); at += page_entries, ++page) {
      const size_t count = std::min(page_entries, words.size() - at);
      const int32_t to = pages[stream][page];
      ops[pool.view().rank_of(to)].push_back({pool.view().k(to), &words[at], count * sizeof(int32_t)});
    }
  }
  for (int r = 0; r < model.num_ranks(); ++r)
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kUpload, ops[r]));
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteKeptPositions(const Model& model, PagePool& pool, const KeptPositions& kept,
                                const CompactPages& compact) {
  std::vector<std::vector<int32_t>> entries(kept.size());  // per stream: the number of positions, then the positions
  std::vector<std::span<const int32_t>> pages(kept.size());
  for (size_t stream = 0; stream < kept.size(); ++stream) {
    if (compact.needs().list_pages == 0 || !compact.needs().lists[stream]) continue;
    pages[stream] = std::span(compact.tables()[stream]).first(compact.needs().list_pages);
    entries[stream].push_back(static_cast<int32_t>(kept[stream].size()));
    entries[stream].insert(entries[stream].end(), kept[stream].begin(), kept[stream].end());
  }
  return WriteWords(model, pool, entries, pages);
}

absl::Status WriteHeavyHitters(const Model& model, PagePool& pool, const KeptPositions& kept,
                               const std::vector<std::vector<float>>& attention, const CompactPages& compact) {
  std::vector<std::vector<int32_t>> entries(kept.size());  // HeavyHitterPages
  std::vector<std::span<const int32_t>> pages(kept.size());
  for (size_t stream = 0; stream < kept.size(); ++stream) {
    if (!compact.needs().streams[stream]) continue;
    const bool listed = compact.needs().list_pages > 0 && compact.needs().lists[stream];
    pages[stream] = std::span(compact.tables()[stream]).subspan(listed ? compact.needs().list_pages : 0);
    entries[stream] = {static_cast<int32_t>(kept[stream].size()), 0};
    for (size_t i = 0; i < kept[stream].size(); ++i) {
      entries[stream].push_back(kept[stream][i]);
      entries[stream].push_back(std::bit_cast<int32_t>(attention[stream][i]));
    }
  }
  return WriteWords(model, pool, entries, pages);
}

absl::Status BeginLists(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                        CompactPages* compact) {
  const KeptPositions lists = selector.lists();
  if (lists.empty()) return absl::OkStatus();
  SPLICE_CHECK(compact != nullptr, "a selector with lists has compact pages");
  SPLICE_RETURN_IF_ERROR(compact->Reserve(num_tokens + 1));
  return WriteKeptPositions(model, pool, lists, *compact);
}

absl::Status RefitCompactPages(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                               std::unique_ptr<CompactPages>& compact) {
  if (compact != nullptr) SPLICE_RETURN_IF_ERROR(FitCompactPages(selector, model, num_tokens, compact));
  if (compact == nullptr) {
    SPLICE_ASSIGN_OR_RETURN(compact, MakeCompactPages(selector, model, pool, num_tokens));
  }
  return BeginLists(model, pool, selector, num_tokens, compact.get());
}

}  // namespace spl::engine
