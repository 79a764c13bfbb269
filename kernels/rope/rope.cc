#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"
#include "kernels/rope/rope_validate.h"

namespace spl::kernels {
namespace {

absl::Status ValidateSequence(const RopeWriteKvArgs& a, size_t index) {
  const RopeSequence& s = a.sequences[index];
  if (s.row_begin < 0 || s.row_end < s.row_begin ||
      s.positions.size() != static_cast<size_t>(s.row_end - s.row_begin)) {
    return InvalidCall("RopeWriteKv: sequence ", index, " has rows [", s.row_begin, ", ", s.row_end, ") and ",
                       s.positions.size(), " positions");
  }
  if (s.page_tables.size() != static_cast<size_t>(a.num_kv_heads)) {
    return InvalidCall("RopeWriteKv: sequence ", index, " has ", s.page_tables.size(), " page tables for ",
                       a.num_kv_heads, " KV heads");
  }
  if (s.turned_by().size() != s.positions.size()) {
    return InvalidCall("RopeWriteKv: sequence ", index, " has ", s.positions.size(), " positions and ", s.angles.size(),
                       " angles");
  }
  for (const int32_t angle : s.turned_by()) {
    if (angle < 0 || angle >= a.table.max_positions) {
      return InvalidCall("RopeWriteKv: position ", angle, " of sequence ", index, " is outside the angle table of ",
                         a.table.max_positions);
    }
  }
  for (int32_t position : s.positions) {
    if (position < 0) return InvalidCall("RopeWriteKv: position ", position, " of sequence ", index, " is negative");
    for (size_t h = 0; h < s.page_tables.size(); ++h) {
      const size_t logical = static_cast<size_t>(position) / kPageTokens;
      const int32_t page = logical < s.page_tables[h].size() ? s.page_tables[h][logical] : kNoPage;
      if (!a.pool.contains(page)) {
        return InvalidCall("RopeWriteKv: position ", position, " of sequence ", index, ", KV head ", h,
                           " has no page (table entry ", page, ", pool of ", a.pool.num_pages, ")");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateRopeWriteKv(const RopeWriteKvArgs& a) {
  if (a.num_qo_heads <= 0 || a.num_kv_heads <= 0 || a.num_qo_heads % a.num_kv_heads != 0) {
    return InvalidCall("RopeWriteKv: ", a.num_qo_heads, " query heads over ", a.num_kv_heads, " KV heads");
  }
  if (a.head_dim <= 0 || a.head_dim % 8 != 0 || a.head_dim > 256) {
    return InvalidCall("RopeWriteKv: head_dim ", a.head_dim, " is not a multiple of 8 up to 256");
  }
  if (a.pool.head_dim != a.head_dim) {
    return InvalidCall("RopeWriteKv: pool has head_dim ", a.pool.head_dim, ", rows have ", a.head_dim);
  }
  if ((a.qk_norm.q_weight == nullptr) != (a.qk_norm.k_weight == nullptr)) {
    return InvalidCall("RopeWriteKv: a norm weight for one of q and k only");
  }
  if (a.qk_norm.q_weight != nullptr && !(a.qk_norm.eps >= 0)) {
    return InvalidCall("RopeWriteKv: eps is ", a.qk_norm.eps);
  }
  if (!IsKvType(a.pool.dtype)) return InvalidCall("RopeWriteKv: pages are f32, bf16 or fp8");
  bool any = false;
  for (const RopeSequence& s : a.sequences) any |= s.row_end > s.row_begin;
  if (any && (a.qkv.data == nullptr || a.table.cos == nullptr || a.table.sin == nullptr || a.pool.base == nullptr)) {
    return InvalidCall("RopeWriteKv: null tensor");
  }
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    if (absl::Status s = ValidateSequence(a, i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
