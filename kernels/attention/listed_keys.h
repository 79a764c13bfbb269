// Attention over a list of positions (VisibilityRule::kList) as attention over everything in front: K and V of the
// list's positions, one behind the other in pages of their own, are a sequence whose entry i is position list[i], and a
// row that sees n entries of the list is a row of that sequence at n - 1. How a device without an attention over lists
// has one (SamKV 3.3: rows over the kept tokens of a layer).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention/attention.h"

namespace spl::kernels {

// One call's rows over one list.
struct ListedRows {
  std::span<const int32_t> list;   // what some row sees of the list given: its beginning; borrowed from there
  std::vector<int32_t> positions;  // [num_rows], ascending: of the row in the gathered sequence; -1: it sees nothing
  int32_t num_empty = 0;           // rows in front that see nothing
  std::vector<int32_t> resident;   // logical pages that hold an entry of `list`, ascending
  int32_t num_pages() const { return static_cast<int32_t>((list.size() + kPageTokens - 1) / kPageTokens); }
};

// InvalidArgument: a list out of order or with a negative position. Cost: linear in rows and list.
absl::StatusOr<ListedRows> ListRows(std::span<const int32_t> list, std::span<const int32_t> positions);

// KV heads that see the same list of a sequence.
struct ListedHeads {
  std::span<const int32_t> list;
  std::vector<int32_t> kv_heads;  // ascending
};

// The heads of rule kList, those with equal lists together. Heads of other rules are in none.
std::vector<ListedHeads> GroupByList(std::span<const HeadStreamView> heads);

// InvalidArgument: a head's table lacks one of the pages that a list needs (ListedRows::resident).
absl::Status CheckResident(std::span<const int32_t> pages, std::span<const int32_t> page_table);

}  // namespace spl::kernels
