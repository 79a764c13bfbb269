#include "kernels/attention/attention.h"

#include "kernels/common/kv_rows.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

absl::Status ValidateShape(const AttentionShape& s, const KvPoolView& pool, int64_t q_row_stride) {
  if (s.num_qo_heads <= 0 || s.num_kv_heads <= 0 || s.num_qo_heads % s.num_kv_heads != 0) {
    return InvalidCall("attention: ", s.num_qo_heads, " query heads over ", s.num_kv_heads, " KV heads");
  }
  if (s.head_dim <= 0 || s.head_dim % 8 != 0 || s.head_dim > 256) {
    return InvalidCall("attention: head_dim ", s.head_dim, " is not a multiple of 8 up to 256");
  }
  if (pool.head_dim != s.head_dim) {
    return InvalidCall("attention: pool has head_dim ", pool.head_dim, ", queries have ", s.head_dim);
  }
  if (!IsKvType(pool.dtype)) return InvalidCall("attention: pages are f32, bf16 or fp8");
  if (q_row_stride < static_cast<int64_t>(s.num_qo_heads) * s.head_dim) {
    return InvalidCall("attention: q_row_stride ", q_row_stride, " is less than a row of ", s.num_qo_heads, " x ",
                       s.head_dim);
  }
  return absl::OkStatus();
}

absl::Status ValidateVisibility(const HeadVisibility& v) {
  switch (v.rule) {
    case VisibilityRule::kFull:
      return absl::OkStatus();
    case VisibilityRule::kBand:
      if (v.num_sinks >= 0 && v.window >= 1) return absl::OkStatus();
      return InvalidCall("attention: band of ", v.num_sinks, " sinks and window ", v.window);
    case VisibilityRule::kList:
      for (size_t i = 0; i < v.indices.size(); ++i) {
        if (v.indices[i] < 0 || (i > 0 && v.indices[i] <= v.indices[i - 1])) {
          return InvalidCall("attention: visibility index ", v.indices[i], " at ", i, " is negative or out of order");
        }
      }
      return absl::OkStatus();
    case VisibilityRule::kSelected:  // known to the device; see ValidateDecodeAttention
    case VisibilityRule::kElsewhere:
      return absl::OkStatus();
    case VisibilityRule::kLines:
      return InvalidCall("attention: lines are for prefill");
  }
  return InvalidCall("attention: unknown visibility rule");
}

// Does not check the bits of `lines`: on a device the host does not see them.
absl::Status ValidateLines(const LineVisibility* lines, const PrefillSequence& s, int32_t kv_len) {
  if (lines == nullptr) return InvalidCall("attention: visibility by lines without `lines`");
  const LineVisibility& v = *lines;
  if (s.positions.empty()) return absl::OkStatus();
  const auto rows = static_cast<int64_t>(s.positions.size());
  for (int64_t i = 0; i < rows; ++i) {
    if (s.positions[static_cast<size_t>(i)] != s.positions.front() + i)
      return InvalidCall("attention: lines of rows at positions that are not consecutive, ",
                         s.positions[static_cast<size_t>(i)], " at row ", i, " after ", s.positions.front());
  }
  if (v.first_position != s.positions.front() || v.num_rows != rows) {
    return InvalidCall("attention: lines of ", v.num_rows, " rows from position ", v.first_position, " for ", rows,
                       " rows at positions ", s.positions.front(), " to ", s.positions.back());
  }
  const int32_t pages = (s.positions.back() + kPageTokens) / kPageTokens;
  if (v.tile_words < (pages + 63) / 64 || v.tiles == nullptr) {
    return InvalidCall("attention: lines with ", v.tile_words, " tile_words for ", pages, " pages, kv_len ", kv_len,
                       v.tiles == nullptr ? ", tiles is null" : "");
  }
  if (v.column_words < 0 || (v.column_words > 0 && (v.column_masks == nullptr || v.columns == nullptr))) {
    return InvalidCall("attention: lines with ", v.column_words, " column_words, column_masks or columns is null");
  }
  return absl::OkStatus();
}

absl::Status ValidateStream(const HeadStreamView& s, const KvPoolView& pool) {
  if (s.kv_len < 0) return InvalidCall("attention: kv_len is ", s.kv_len);
  const size_t num_pages = (static_cast<size_t>(s.kv_len) + kPageTokens - 1) / kPageTokens;
  if (s.page_table.size() < num_pages) {
    return InvalidCall("attention: page table of ", s.page_table.size(), " entries for kv_len ", s.kv_len);
  }
  for (size_t i = 0; i < num_pages; ++i) {
    if (s.page_table[i] != kNoPage && !pool.contains(s.page_table[i])) {
      return InvalidCall("attention: page ", s.page_table[i], " at ", i, " is outside the pool of ", pool.num_pages);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateSequence(const PrefillAttentionArgs& a, const PrefillSequence& s) {
  if (s.row_begin < 0 || s.row_end < s.row_begin ||
      s.positions.size() != static_cast<size_t>(s.row_end - s.row_begin)) {
    return InvalidCall("attention: rows [", s.row_begin, ", ", s.row_end, ") with ", s.positions.size(), " positions");
  }
  if (s.heads.size() != static_cast<size_t>(a.shape.num_kv_heads)) {
    return InvalidCall("attention: ", s.heads.size(), " head streams for ", a.shape.num_kv_heads, " KV heads");
  }
  for (size_t i = 0; i < s.positions.size(); ++i) {
    if (s.positions[i] < 0 || (i > 0 && s.positions[i] < s.positions[i - 1])) {
      return InvalidCall("attention: position ", s.positions[i], " at row ", i, " is negative or out of order");
    }
  }
  for (const HeadStreamView& head : s.heads) {
    if (absl::Status status = ValidateStream(head, a.pool); !status.ok()) return status;
    const HeadVisibility& v = head.visibility;
    if (v.rule == VisibilityRule::kSelected || v.rule == VisibilityRule::kElsewhere)
      return InvalidCall("attention: rule kSelected or kElsewhere in prefill; both are of decode steps");
    if (absl::Status status =
            v.rule == VisibilityRule::kLines ? ValidateLines(v.lines, s, head.kv_len) : ValidateVisibility(v);
        !status.ok()) {
      return status;
    }
    if (!s.positions.empty() && s.positions.back() >= head.kv_len) {
      return InvalidCall("attention: row at position ", s.positions.back(), " but kv_len is ", head.kv_len);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidatePrefillAttention(const PrefillAttentionArgs& a) {
  if (a.last_rows < 0) return InvalidCall("attention: last_rows is ", a.last_rows);
  if (absl::Status s = ValidateShape(a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  bool any_rows = false;
  for (const PrefillSequence& s : a.sequences) {
    if (absl::Status status = ValidateSequence(a, s); !status.ok()) return status;
    any_rows |= s.row_end > s.row_begin;
  }
  if (any_rows && (a.q.data == nullptr || a.out.data == nullptr || a.pool.base == nullptr)) {
    return InvalidCall("attention: null tensor");
  }
  return absl::OkStatus();
}

absl::Status ValidateDecodeAttention(const DecodeAttentionArgs& a) {
  if (absl::Status s = ValidateShape(a.shape, a.pool, a.q_row_stride); !s.ok()) return s;
  if (a.streams.size() % static_cast<size_t>(a.shape.num_kv_heads) != 0) {
    return InvalidCall("attention: ", a.streams.size(), " head streams are no multiple of ", a.shape.num_kv_heads,
                       " KV heads");
  }
  for (const HeadStreamView& stream : a.streams) {
    if (absl::Status s = ValidateStream(stream, a.pool); !s.ok()) return s;
    if (absl::Status s = ValidateVisibility(stream.visibility); !s.ok()) return s;
    if (stream.visibility.rule == VisibilityRule::kSelected &&
        (a.lists.tokens == nullptr || a.lists.counts == nullptr || a.lists.stride < 1)) {
      return InvalidCall("attention: a stream of rule kSelected, but lists has tokens ", a.lists.tokens != nullptr,
                         ", counts ", a.lists.counts != nullptr, ", stride ", a.lists.stride);
    }
  }
  if (!a.streams.empty() && (a.q.data == nullptr || a.out.data == nullptr || a.pool.base == nullptr)) {
    return InvalidCall("attention: null tensor");
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
