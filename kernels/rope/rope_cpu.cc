#include <algorithm>

#include "kernels/common/e4m3_rows_isa.h"
#include "kernels/common/parallel.h"
#include "kernels/rope/rope_isa.h"
#include "kernels/rope/rope_validate.h"

namespace spl::kernels::cpu {
namespace {

// Row `slot` of a half page.
void Store(const KernelContext& ctx, const KvPoolView& pool, const float* row, int32_t slot, std::byte* half_page) {
  if (pool.dtype != DType::kE4M3) return RopeKernelsFor(ctx.isa).store(row, pool.head_dim, pool.dtype, slot, half_page);
  auto* const codes = reinterpret_cast<uint8_t*>(half_page) + int64_t{slot} * pool.head_dim;
  E4M3RowKernelsFor(ctx.isa).quantize(row, 1, pool.head_dim, codes, pool.scales(half_page) + slot);
}

void RotateRow(const KernelContext& ctx, const RopeWriteKvArgs& a, const RopeSequence& s, int64_t index) {
  const RopeKernels& kernels = RopeKernelsFor(ctx.isa);
  const int32_t d = a.head_dim, half = d / 2;
  const int64_t stride = static_cast<int64_t>(a.num_qo_heads + 2 * a.num_kv_heads) * d;
  const int32_t position = s.positions[static_cast<size_t>(index)], slot = position % kPageTokens;
  const int64_t angle = s.turned_by()[static_cast<size_t>(index)];
  float* q = a.qkv + (s.row_begin + index) * stride;
  const float* k = q + static_cast<int64_t>(a.num_qo_heads) * d;
  const float* v = k + static_cast<int64_t>(a.num_kv_heads) * d;
  const float* cos = a.table.cos + angle * half;
  const float* sin = a.table.sin + angle * half;
  float rotated[256];  // the largest head_dim
  for (int32_t h = 0; h < a.num_qo_heads; ++h) {
    kernels.rotate(q + h * d, a.qk_norm.q_weight, a.qk_norm.eps, cos, sin, half, q + h * d);
  }
  for (int32_t h = 0; h < a.num_kv_heads; ++h) {
    const int32_t page = s.page_tables[static_cast<size_t>(h)][static_cast<size_t>(position / kPageTokens)];
    kernels.rotate(k + h * d, a.qk_norm.k_weight, a.qk_norm.eps, cos, sin, half, rotated);
    Store(ctx, a.pool, rotated, slot, a.pool.k(page));
    Store(ctx, a.pool, v + h * d, slot, a.pool.v(page));
  }
}

}  // namespace

absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& a) {
  if (absl::Status s = ValidateRopeWriteKv(a); !s.ok()) return s;
  if (a.q_out.data != nullptr) return absl::UnimplementedError("RopeWriteKv: q_out on the host");
  const int64_t row_floats = static_cast<int64_t>(a.num_qo_heads + 2 * a.num_kv_heads) * a.head_dim;
  const int64_t grain = (int64_t{32} << 10) / row_floats;
  // A decode batch is many sequences of one row, a prefill slice one sequence of many: split whichever is longer.
  if (a.sequences.size() == 1) {
    const RopeSequence& s = a.sequences[0];
    ParallelRows(ctx, s.row_end - s.row_begin, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) RotateRow(ctx, a, s, i);
    });
    return absl::OkStatus();
  }
  int64_t num_rows = 0;
  for (const RopeSequence& s : a.sequences) num_rows += s.row_end - s.row_begin;
  const int64_t num_sequences = static_cast<int64_t>(a.sequences.size());
  const int64_t rows_each = std::max<int64_t>(num_rows / std::max<int64_t>(num_sequences, 1), 1);
  ParallelRows(ctx, num_sequences, grain / rows_each, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RopeSequence& s = a.sequences[static_cast<size_t>(i)];
      for (int64_t row = 0; row < s.row_end - s.row_begin; ++row) RotateRow(ctx, a, s, row);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
