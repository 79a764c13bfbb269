// Attention over a list of positions (VisibilityRule::kList) for a device that has no kernel for lists. K and V of the
// listed positions are gathered into pages of their own: a new sequence whose entry i is position list[i]. A row that
// sees n entries of the list is then a row at position n - 1 of that sequence, and sees everything before it. (SamKV
// 3.3: rows over the kept tokens of a layer.)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention/attention.h"

namespace spl::kernels {

// One call's rows over one list.
struct ListedRows {
  std::span<const int32_t> list;  // the beginning of the given list, as far as some row sees it; borrowed
  // [num_rows], ascending: each row's position in the gathered sequence; -1: it sees nothing
  std::vector<int32_t> positions;
  int32_t num_empty = 0;          // leading rows that see nothing
  std::vector<int32_t> resident;  // logical pages that hold an entry of `list`, ascending
  int32_t num_pages() const { return static_cast<int32_t>((list.size() + kPageTokens - 1) / kPageTokens); }
};

// InvalidArgument: a list out of order or with a negative position. Cost: linear in rows and list.
absl::StatusOr<ListedRows> ListRows(std::span<const int32_t> list, std::span<const int32_t> positions);

// KV heads that see the same list of a sequence.
struct ListedHeads {
  std::span<const int32_t> list;
  std::vector<int32_t> kv_heads;  // ascending
};

// Groups the heads of rule kList by equal lists. Heads of other rules are in no group.
std::vector<ListedHeads> GroupByList(std::span<const HeadStreamView> heads);

// InvalidArgument: a head's table lacks one of the pages that a list needs (ListedRows::resident).
absl::Status CheckResident(std::span<const int32_t> pages, std::span<const int32_t> page_table);

}  // namespace spl::kernels
