#include "kernels/kv_copy/fuse_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

double Dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += double{a[c]} * b[c];
  return sum;
}

int32_t PageOf(const FuseRowsArgs& a, int32_t kv_head, int32_t position) {
  const std::span<const int32_t> table = a.rows.page_tables[static_cast<size_t>(kv_head)];
  const auto page = static_cast<size_t>(position / kPageTokens);
  return page < table.size() ? table[page] : kNoPage;
}

}  // namespace

bool FuseRow(std::span<const float> old_row, std::span<float> new_row) {
  const std::span<const float> fresh = new_row;
  // Equal rows stay bitwise unchanged, as theta = 1 demands.
  if (std::equal(old_row.begin(), old_row.end(), fresh.begin(), fresh.end())) return false;
  const double norms = std::sqrt(Dot(fresh, fresh) * Dot(old_row, old_row));
  const double theta = norms > 0 ? Dot(fresh, old_row) / norms : 0;
  for (size_t c = 0; c < new_row.size(); ++c)
    new_row[c] = static_cast<float>(theta * new_row[c] + (1 - theta) * old_row[c]);
  return true;
}

size_t FusedRowsBytes(DType pool, int32_t head_dim, int64_t num_rows) {
  return static_cast<size_t>(num_rows) * static_cast<size_t>(KvRowBytes(pool, head_dim) + (pool == DType::kE4M3));
}

absl::Status ValidateFuseRows(const FuseRowsArgs& a) {
  if (a.num_kv_heads < 1 || a.pool.head_dim < 1 || !IsKvType(a.pool.dtype))
    return InvalidCall("FuseRows: ", a.num_kv_heads, " KV heads of ", a.pool.head_dim, "; pages are f32, bf16 or fp8");
  if (a.rows.row_end < a.rows.row_begin ||
      a.rows.positions.size() != static_cast<size_t>(a.rows.row_end - a.rows.row_begin) ||
      a.rows.page_tables.size() != static_cast<size_t>(a.num_kv_heads))
    return InvalidCall("FuseRows: rows [", a.rows.row_begin, ", ", a.rows.row_end, ") with ", a.rows.positions.size(),
                       " positions and ", a.rows.page_tables.size(), " page tables");
  for (const int32_t row : a.row_ids) {
    if (row < 0 || static_cast<size_t>(row) >= a.rows.positions.size())
      return InvalidCall("FuseRows: row ", row, " of ", a.rows.positions.size());
    for (int32_t h = 0; h < a.num_kv_heads; ++h) {
      if (PageOf(a, h, a.rows.positions[static_cast<size_t>(row)]) == kNoPage)
        return InvalidCall("FuseRows: row ", row, " at position ", a.rows.positions[static_cast<size_t>(row)],
                           " has no page for KV head ", h);
    }
  }
  if (!a.row_ids.empty() && (a.saved == nullptr || a.pool.base == nullptr)) return InvalidCall("FuseRows: null tensor");
  return absl::OkStatus();
}

namespace {

// The saved rows: num_rows of codes or elements; kE4M3: then num_rows scales.
struct SavedRows {
  std::byte* data;
  DType dtype;
  int32_t head_dim;
  int64_t num_rows;

  std::byte* elements(int64_t row) const { return data + row * KvRowBytes(dtype, head_dim); }
  uint8_t& scale(int64_t row) const { return reinterpret_cast<uint8_t*>(elements(num_rows))[row]; }

  void Save(int64_t row, std::byte* half, int32_t slot) const {
    const auto bytes = static_cast<size_t>(KvRowBytes(dtype, head_dim));
    std::memcpy(elements(row), half + static_cast<size_t>(slot) * bytes, bytes);
    if (dtype == DType::kE4M3) scale(row) = KvRowScale(head_dim, half, slot);
  }
  void Load(int64_t row, std::span<float> to) const {
    if (dtype == DType::kE4M3)
      return WidenRow(reinterpret_cast<const uint8_t*>(elements(row)), scale(row), head_dim, to.data());
    for (int32_t c = 0; c < head_dim; ++c) to[static_cast<size_t>(c)] = LoadElement(elements(row), dtype, c);
  }
};

}  // namespace

absl::Status cpu::FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) {
  if (absl::Status s = ValidateFuseRows(a); !s.ok()) return s;
  const KvPoolView& pool = a.pool;
  const auto num_rows = static_cast<int64_t>(a.row_ids.size());
  const SavedRows saved{static_cast<std::byte*>(a.saved), pool.dtype, pool.head_dim, num_rows * a.num_kv_heads * 2};
  ParallelRows(ctx, num_rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> old_row(static_cast<size_t>(pool.head_dim)), new_row(old_row.size());
    for (int64_t i = begin; i < end; ++i) {
      const int32_t position = a.rows.positions[static_cast<size_t>(a.row_ids[static_cast<size_t>(i)])];
      const int32_t slot = position % kPageTokens;
      for (int32_t h = 0; h < a.num_kv_heads; ++h) {
        const int32_t page = PageOf(a, h, position);
        for (int half = 0; half < 2; ++half) {
          std::byte* const rows = half == 0 ? pool.k(page) : pool.v(page);
          const int64_t row = (i * a.num_kv_heads + h) * 2 + half;
          if (a.step == FuseStep::kSave) {
            saved.Save(row, rows, slot);
            continue;
          }
          saved.Load(row, old_row);
          LoadKvRow(pool.dtype, pool.head_dim, rows, slot, new_row.data());
          if (FuseRow(old_row, new_row)) StoreKvRow(pool.dtype, pool.head_dim, rows, slot, new_row.data());
        }
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
