#include "services/engine/runtime/final_pages.h"

#include <utility>

#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

PageRanges PagesWithout(std::span<const PositionRange> rows, int32_t num_tokens, int32_t end) {
  PageRanges with_rows;
  for (const PositionRange& range : rows)
    with_rows.push_back({range.begin / kernels::kPageTokens, PagesFor(range.end)});
  const int32_t last = end < num_tokens ? end / kernels::kPageTokens : PagesFor(num_tokens);
  return ComplementOf(MergeRanges(std::move(with_rows)), {0, last});
}

PageRanges GivenPages::Give(int32_t layer, std::span<const PositionRange> pages) {
  PageRanges& given = given_[static_cast<size_t>(layer)];
  if (pages.empty()) return {};
  PageRanges fresh = IntersectionOf(pages, ComplementOf(given, {0, pages.back().end}));
  given = UnionOf(given, pages);
  return fresh;
}

}  // namespace spl::engine
