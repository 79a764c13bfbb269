#include <algorithm>
#include <cmath>

#include "kernels/common/e4m3.h"
#include "kernels/common/parallel.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::cpu {

void QuantizeRow(const float* x, int64_t width, const Activations& out, int64_t row, int64_t num_rows) {
  auto* const codes = static_cast<uint8_t*>(out.data) + row * width;
  const int64_t group = out.scale_group == 0 ? width : out.scale_group;
  for (int64_t begin = 0; begin < width; begin += group) {
    const int64_t end = std::min(begin + group, width);
    float max = 0;
    for (int64_t j = begin; j < end; ++j) max = std::max(max, std::abs(x[j]));
    const bool zero = max < 0x1p-100f;
    const float by = zero ? 0 : kE4M3Max / max;
    for (int64_t j = begin; j < end; ++j) codes[j] = FloatToE4M3(x[j] * by);
    out.scales[begin / group * E4M3Rows(num_rows) + row] = zero ? 1 : max / kE4M3Max;
  }
}

absl::Status QuantizeRows(const KernelContext& ctx, const QuantizeRowsArgs& a) {
  if (absl::Status s = ValidateQuantizeRows(a); !s.ok()) return s;
  ParallelRows(ctx, a.num_rows, (int64_t{16} << 10) / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) QuantizeRow(a.x + i * a.width, a.width, a.out, i, a.num_rows);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
