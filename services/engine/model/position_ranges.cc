#include "services/engine/model/position_ranges.h"

#include <algorithm>

namespace spl::engine {

PositionRanges MergeRanges(PositionRanges ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const PositionRange& a, const PositionRange& b) { return a.begin < b.begin; });
  PositionRanges merged;
  for (const PositionRange& range : ranges) {
    if (range.size() <= 0) continue;
    if (!merged.empty() && range.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

PositionRanges UnionOf(std::span<const PositionRange> a, std::span<const PositionRange> b) {
  PositionRanges all(a.begin(), a.end());
  all.insert(all.end(), b.begin(), b.end());
  return MergeRanges(std::move(all));
}

PositionRanges IntersectionOf(std::span<const PositionRange> a, std::span<const PositionRange> b) {
  PositionRanges common;
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    const PositionRange range{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (range.size() > 0) common.push_back(range);
    a[i].end < b[j].end ? ++i : ++j;
  }
  return common;
}

PositionRanges ComplementOf(std::span<const PositionRange> ranges, PositionRange within) {
  PositionRanges rest;
  int32_t at = within.begin;
  for (const PositionRange& range : ranges) {
    if (range.begin >= within.end) break;
    if (range.begin > at) rest.push_back({at, range.begin});
    at = std::max(at, range.end);
  }
  if (at < within.end) rest.push_back({at, within.end});
  return rest;
}

PositionRanges NumberedWithin(std::span<const PositionRange> ranges, std::span<const PositionRange> only) {
  PositionRanges numbered;
  int32_t at = 0;  // new number of the range's first position
  for (const PositionRange& range : only) {
    for (const PositionRange& part : IntersectionOf(ranges, {&range, 1}))
      numbered.push_back({at + part.begin - range.begin, at + part.end - range.begin});
    at += range.size();
  }
  return MergeRanges(std::move(numbered));
}

void ToPositions(std::span<int32_t> numbers, std::span<const PositionRange> ranges) {
  size_t next = 0;
  int32_t before = 0;
  for (const PositionRange& range : ranges) {
    for (; next < numbers.size() && numbers[next] < before + range.size(); ++next)
      numbers[next] += range.begin - before;
    before += range.size();
  }
}

PositionRanges RangesOf(std::span<const int32_t> positions) {
  PositionRanges ranges;
  for (const int32_t position : positions) {
    if (!ranges.empty() && ranges.back().end == position) {
      ++ranges.back().end;
    } else {
      ranges.push_back({position, position + 1});
    }
  }
  return ranges;
}

int64_t CountOf(std::span<const PositionRange> ranges) {
  int64_t count = 0;
  for (const PositionRange& range : ranges) count += range.size();
  return count;
}

bool ContainsPosition(std::span<const PositionRange> ranges, int32_t position) {
  const auto it = std::upper_bound(ranges.begin(), ranges.end(), position,
                                   [](int32_t p, const PositionRange& range) { return p < range.end; });
  return it != ranges.end() && it->begin <= position;
}

}  // namespace spl::engine
