#include "kernels/kv_copy/fuse_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

double Dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += double{a[c]} * b[c];
  return sum;
}

void Load(const std::byte* from, DType dtype, std::vector<float>& to) {
  for (size_t c = 0; c < to.size(); ++c)
    to[c] = dtype == DType::kF32 ? reinterpret_cast<const float*>(from)[c]
                                 : ToFloat(reinterpret_cast<const bf16*>(from)[c]);
}

void Store(const std::vector<float>& from, DType dtype, std::byte* to) {
  for (size_t c = 0; c < from.size(); ++c) {
    if (dtype == DType::kF32) {
      reinterpret_cast<float*>(to)[c] = from[c];
    } else {
      reinterpret_cast<bf16*>(to)[c] = ToBf16(from[c]);
    }
  }
}

int32_t PageOf(const FuseRowsArgs& a, int32_t kv_head, int32_t position) {
  const std::span<const int32_t> table = a.rows.page_tables[static_cast<size_t>(kv_head)];
  const auto page = static_cast<size_t>(position / kPageTokens);
  return page < table.size() ? table[page] : kNoPage;
}

}  // namespace

void FuseRow(std::span<const float> old_row, std::span<float> new_row) {
  const std::span<const float> fresh = new_row;
  // Equal rows stay bitwise unchanged, as theta = 1 demands.
  if (std::equal(old_row.begin(), old_row.end(), fresh.begin(), fresh.end())) return;
  const double norms = std::sqrt(Dot(fresh, fresh) * Dot(old_row, old_row));
  const double theta = norms > 0 ? Dot(fresh, old_row) / norms : 0;
  for (size_t c = 0; c < new_row.size(); ++c)
    new_row[c] = static_cast<float>(theta * new_row[c] + (1 - theta) * old_row[c]);
}

absl::Status ValidateFuseRows(const FuseRowsArgs& a) {
  if (a.num_kv_heads < 1 || a.pool.head_dim < 1 || a.pool.dtype == DType::kF16)
    return InvalidCall("FuseRows: ", a.num_kv_heads, " KV heads of ", a.pool.head_dim, "; pages are f32 or bf16");
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

absl::Status cpu::FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) {
  if (absl::Status s = ValidateFuseRows(a); !s.ok()) return s;
  const size_t row_bytes = static_cast<size_t>(a.pool.head_dim) * DTypeBytes(a.pool.dtype);
  ParallelRows(ctx, static_cast<int64_t>(a.row_ids.size()), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> old_row(static_cast<size_t>(a.pool.head_dim)), new_row(old_row.size());
    for (int64_t i = begin; i < end; ++i) {
      const int32_t position = a.rows.positions[static_cast<size_t>(a.row_ids[static_cast<size_t>(i)])];
      const size_t slot = static_cast<size_t>(position % kPageTokens) * row_bytes;
      for (int32_t h = 0; h < a.num_kv_heads; ++h) {
        const int32_t page = PageOf(a, h, position);
        for (int half = 0; half < 2; ++half) {
          std::byte* const row = (half == 0 ? a.pool.k(page) : a.pool.v(page)) + slot;
          std::byte* const saved =
              static_cast<std::byte*>(a.saved) + static_cast<size_t>((i * a.num_kv_heads + h) * 2 + half) * row_bytes;
          if (a.step == FuseStep::kSave) {
            std::memcpy(saved, row, row_bytes);
            continue;
          }
          Load(saved, a.pool.dtype, old_row);
          Load(row, a.pool.dtype, new_row);
          FuseRow(old_row, new_row);
          Store(new_row, a.pool.dtype, row);
        }
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
