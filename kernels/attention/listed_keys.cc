#include "kernels/attention/listed_keys.h"

#include <algorithm>

#include "kernels/common/status.h"

namespace spl::kernels {

absl::StatusOr<ListedRows> ListRows(std::span<const int32_t> list, std::span<const int32_t> positions) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] < 0 || (i > 0 && list[i] <= list[i - 1]))
      return InvalidCall("attention: visibility index ", list[i], " at ", i, " is negative or out of order");
  }
  ListedRows rows;
  rows.positions.reserve(positions.size());
  size_t seen = 0;
  for (const int32_t position : positions) {
    while (seen < list.size() && list[seen] <= position) ++seen;
    rows.num_empty += seen == 0;
    rows.positions.push_back(static_cast<int32_t>(seen) - 1);
  }
  rows.list = list.first(seen);
  for (const int32_t position : rows.list) {
    const int32_t page = position / kPageTokens;
    if (rows.resident.empty() || rows.resident.back() != page) rows.resident.push_back(page);
  }
  return rows;
}

std::vector<ListedHeads> GroupByList(std::span<const HeadStreamView> heads) {
  std::vector<ListedHeads> groups;
  for (size_t h = 0; h < heads.size(); ++h) {
    const HeadVisibility& v = heads[h].visibility;
    if (v.rule != VisibilityRule::kList) continue;
    const auto same = [&](const ListedHeads& group) {
      return (group.list.data() == v.indices.data() && group.list.size() == v.indices.size()) ||
             std::equal(group.list.begin(), group.list.end(), v.indices.begin(), v.indices.end());
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(groups.end(), ListedHeads{v.indices, {}});
    group->kv_heads.push_back(static_cast<int32_t>(h));
  }
  return groups;
}

absl::Status CheckResident(std::span<const int32_t> pages, std::span<const int32_t> page_table) {
  for (const int32_t page : pages) {
    if (static_cast<size_t>(page) >= page_table.size() || page_table[static_cast<size_t>(page)] == kNoPage)
      return InvalidCall("attention: a list names a position of page ", page, ", which is not resident; page table of ",
                         page_table.size(), " entries");
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
