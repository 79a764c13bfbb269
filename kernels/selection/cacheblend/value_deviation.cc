#include "kernels/selection/cacheblend/value_deviation.h"

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

template <typename Sum>
float Deviation(const ValueDeviationArgs& a, int64_t index) {
  const int64_t stride = static_cast<int64_t>(a.num_qo_heads + 2 * a.num_kv_heads) * a.head_dim;
  const int32_t position = a.rows.positions[static_cast<size_t>(index)];
  const float* v =
      a.qkv + (a.rows.row_begin + index) * stride + static_cast<int64_t>(a.num_qo_heads + a.num_kv_heads) * a.head_dim;
  Sum sum = 0;
  for (int32_t h = 0; h < a.num_kv_heads; ++h) {
    const int32_t page = a.rows.page_tables[static_cast<size_t>(h)][static_cast<size_t>(position / kPageTokens)];
    for (int32_t c = 0; c < a.head_dim; ++c) {
      const Sum d = static_cast<Sum>(v[h * a.head_dim + c]) -
                    static_cast<Sum>(KvElement(a.pool, a.pool.v(page), position % kPageTokens, c));
      sum += d * d;
    }
  }
  return static_cast<float>(sum);
}

}  // namespace

absl::Status ValidateValueDeviation(const ValueDeviationArgs& a) {
  const int32_t rows = a.rows.row_end - a.rows.row_begin;
  if (a.num_qo_heads <= 0 || a.num_kv_heads <= 0 || a.head_dim <= 0 || a.pool.head_dim != a.head_dim || rows < 0)
    return InvalidCall("ValueDeviation: ", a.num_qo_heads, " and ", a.num_kv_heads, " heads of ", a.head_dim, ", ",
                       rows, " rows");
  if (a.rows.positions.size() != static_cast<size_t>(rows) ||
      a.rows.page_tables.size() != static_cast<size_t>(a.num_kv_heads))
    return InvalidCall("ValueDeviation: ", a.rows.positions.size(), " positions, ", a.rows.page_tables.size(),
                       " page tables");
  if (rows > 0 && (a.qkv.data == nullptr || a.scores == nullptr)) return InvalidCall("ValueDeviation: null tensor");
  return absl::OkStatus();
}

absl::Status ref::ValueDeviation(const KernelContext&, const ValueDeviationArgs& a) {
  if (absl::Status s = ValidateValueDeviation(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.rows.row_end - a.rows.row_begin; ++i) a.scores[i] = Deviation<double>(a, i);
  return absl::OkStatus();
}

absl::Status cpu::ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& a) {
  if (absl::Status s = ValidateValueDeviation(a); !s.ok()) return s;
  ParallelRows(ctx, a.rows.row_end - a.rows.row_begin, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a.scores[i] = Deviation<float>(a, i);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
