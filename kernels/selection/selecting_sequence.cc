#include "kernels/selection/selecting_sequence.h"

#include <algorithm>
#include <string>

#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"
#include "kernels/selection/candidates.h"

namespace spl::kernels {

absl::Status ValidateSelectingShape(const char* op, const AttentionShape& s, const KvPoolView& pool,
                                    int64_t q_row_stride) {
  if (s.num_qo_heads <= 0 || s.num_kv_heads <= 0 || s.num_qo_heads % s.num_kv_heads != 0)
    return InvalidCall(op, ": shape has ", s.num_qo_heads, " query heads over ", s.num_kv_heads, " KV heads");
  if (s.head_dim <= 0 || s.head_dim % 8 != 0 || s.head_dim > 256)
    return InvalidCall(op, ": head_dim ", s.head_dim, " is not a multiple of 8 up to 256");
  if (pool.head_dim != s.head_dim)
    return InvalidCall(op, ": pool.head_dim is ", pool.head_dim, ", shape.head_dim ", s.head_dim);
  if (!IsKvType(pool.dtype))
    return InvalidCall(op, ": pool.dtype is ", std::string(DTypeName(pool.dtype)), "; pages are f32, bf16 or fp8");
  if (!(s.sm_scale > 0)) return InvalidCall(op, ": sm_scale is ", s.sm_scale, ", it must be positive");
  if (q_row_stride < int64_t{s.num_qo_heads} * s.head_dim)
    return InvalidCall(op, ": q_row_stride ", q_row_stride, " is less than a row of ", s.num_qo_heads, " x ",
                       s.head_dim);
  return absl::OkStatus();
}

namespace {

absl::Status ValidateTable(const char* op, const char* field, std::span<const int32_t> table, int64_t pages,
                           const KvPoolView& pool, int32_t kv_len, bool may_lack = false) {
  if (static_cast<int64_t>(table.size()) < pages)
    return InvalidCall(op, ": ", field, " has ", table.size(), " pages, kv_len ", kv_len, " needs ", pages);
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t page = table[static_cast<size_t>(i)];
    if (page == kNoPage && may_lack) continue;
    if (page == kNoPage) return InvalidCall(op, ": ", field, " has no page at ", i, "; all keys must be resident");
    if (!pool.contains(page))
      return InvalidCall(op, ": ", field, " names page ", page, " at ", i, ", outside the pool of ", pool.num_pages);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSelectingTables(const char* op, const SelectingSequence& s, const KvPoolView& pool,
                                     int32_t num_kv_heads, int64_t compact_pages, bool reads_keys) {
  if (s.kv_len < 1) return InvalidCall(op, ": a sequence that selects has kv_len ", s.kv_len);
  const auto heads = static_cast<size_t>(num_kv_heads);
  if (s.page_tables.size() != heads || s.compact_tables.size() != heads)
    return InvalidCall(op, ": ", s.page_tables.size(), " page_tables and ", s.compact_tables.size(),
                       " compact_tables for ", num_kv_heads, " KV heads");
  const int64_t pages = reads_keys ? (int64_t{s.kv_len} + kPageTokens - 1) / kPageTokens : 0;
  for (size_t h = 0; h < heads; ++h) {
    if (s.compact_tables[h].empty()) continue;
    absl::Status status =
        ValidateTable(op, "page_tables", s.page_tables[h], s.step.listed ? 0 : pages, pool, s.kv_len, s.hot.any());
    if (status.ok()) status = ValidateTable(op, "compact_tables", s.compact_tables[h], compact_pages, pool, s.kv_len);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ValidateListedStreams(const char* op, std::span<const SelectingSequence> sequences, const KvPoolView& pool,
                                   int32_t num_kv_heads, const std::function<int64_t(int32_t)>& compact_pages) {
  for (const SelectingSequence& s : sequences) {
    if (!s.step.listed || !s.step.selects) continue;
    for (int32_t h = 0; h < num_kv_heads; ++h) {
      const std::span<const int32_t> table = s.page_tables[static_cast<size_t>(h)];
      const std::span<const int32_t> compact = s.compact_tables[static_cast<size_t>(h)];
      if (compact.empty() || s.list_tables[static_cast<size_t>(h)].empty()) continue;
      if (absl::Status status = ValidateList(op, s, pool, h); !status.ok()) return status;
      const Candidates own(pool, s, h);
      if (static_cast<int64_t>(compact.size()) < compact_pages(own.count()))
        return InvalidCall(op, ": compact_tables has ", compact.size(), " pages, ", own.count(), " candidates need ",
                           compact_pages(own.count()));
      // The positions that are read: all for a choice; otherwise the fresh ones, and the granule in which they begin.
      const int32_t num_listed = own.count() - (s.kv_len - s.first_fresh);
      for (int32_t i = s.step.refresh ? 0 : std::max(num_listed - kBoundTokens, 0); i < own.count(); ++i) {
        const auto page = static_cast<size_t>(own.position(i) / kPageTokens);
        if (page >= table.size() || !pool.contains(table[page]))
          return InvalidCall(op, ": page_tables has no page of the pool at ", page, ", where candidate ", i, " is");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateCompactStep(const char* op, const SelectingSequence& s) {
  if (s.step.compact_len < 0 || s.step.compact_len > s.kv_len)
    return InvalidCall(op, ": compact_len ", s.step.compact_len, " is outside [0, kv_len = ", s.kv_len, "]");
  if (s.step.parity > 1) return InvalidCall(op, ": parity is ", int{s.step.parity}, ", it is 0 or 1");
  if (s.step.first && !s.step.refresh) return InvalidCall(op, ": first without refresh");
  return absl::OkStatus();
}

absl::Status ValidateListBudget(const char* op, const SelectingSequence& s, const TokenLists& lists) {
  if (lists.stride < 1) return InvalidCall(op, ": lists.stride is ", lists.stride);
  if (s.budget < 1 || s.budget > lists.stride)
    return InvalidCall(op, ": budget ", s.budget, " is outside [1, lists.stride = ", lists.stride, "]");
  if (s.budget > kSelectBudgetMax) return InvalidCall(op, ": budget ", s.budget, ", at most ", kSelectBudgetMax);
  if (s.recent < 1 || s.recent > s.budget)
    return InvalidCall(op, ": recent ", s.recent, " is outside [1, budget = ", s.budget, "]");
  return absl::OkStatus();
}

}  // namespace spl::kernels
