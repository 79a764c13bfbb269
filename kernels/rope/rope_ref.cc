#include <cmath>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/rope/rope_validate.h"

namespace spl::kernels::ref {
namespace {

// out = in, normalised when there is a weight, rotated by the angles of one position; out may be in.
void Rotate(const float* in, const float* weight, float eps, const float* cos, const float* sin, int half, float* out) {
  double scale = 1;
  if (weight != nullptr) {
    double sum = 0;
    for (int c = 0; c < 2 * half; ++c) sum += static_cast<double>(in[c]) * in[c];
    scale = 1.0 / std::sqrt(sum / (2 * half) + eps);
  }
  for (int c = 0; c < half; ++c) {
    const double x = in[c] * scale * (weight != nullptr ? weight[c] : 1.0);
    const double y = in[c + half] * scale * (weight != nullptr ? weight[c + half] : 1.0);
    out[c] = static_cast<float>(x * cos[c] - y * sin[c]);
    out[c + half] = static_cast<float>(y * cos[c] + x * sin[c]);
  }
}

void Row(const RopeWriteKvArgs& a, const RopeSequence& s, int index) {
  const int d = a.head_dim, half = d / 2;
  const int64_t stride = static_cast<int64_t>(a.num_qo_heads + 2 * a.num_kv_heads) * d;
  const int32_t position = s.positions[index];
  float* q = a.qkv + (s.row_begin + index) * stride;
  const float* k = q + static_cast<int64_t>(a.num_qo_heads) * d;
  const float* v = k + static_cast<int64_t>(a.num_kv_heads) * d;
  const float* cos = a.table.cos + static_cast<int64_t>(s.turned_by()[index]) * half;
  const float* sin = a.table.sin + static_cast<int64_t>(s.turned_by()[index]) * half;
  for (int h = 0; h < a.num_qo_heads; ++h)
    Rotate(q + h * d, a.qk_norm.q_weight, a.qk_norm.eps, cos, sin, half, q + h * d);
  std::vector<float> rotated(d);
  for (int h = 0; h < a.num_kv_heads; ++h) {
    const int32_t page = s.page_tables[h][position / kPageTokens];
    Rotate(k + h * d, a.qk_norm.k_weight, a.qk_norm.eps, cos, sin, half, rotated.data());
    StoreKvRow(a.pool.dtype, d, a.pool.k(page), position % kPageTokens, rotated.data());
    StoreKvRow(a.pool.dtype, d, a.pool.v(page), position % kPageTokens, v + h * d);
  }
}

}  // namespace

absl::Status RopeWriteKv(const KernelContext&, const RopeWriteKvArgs& a) {
  if (absl::Status s = ValidateRopeWriteKv(a); !s.ok()) return s;
  if (a.q_out.data != nullptr) return absl::UnimplementedError("RopeWriteKv: q_out on the host");
  for (const RopeSequence& s : a.sequences) {
    for (int i = 0; i < s.row_end - s.row_begin; ++i) Row(a, s, i);
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
