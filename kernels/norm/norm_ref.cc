#include <cmath>
#include <vector>

#include "kernels/norm/norm_validate.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::ref {

absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) {
  if (absl::Status s = ValidateRmsNorm(a); !s.ok()) return s;
  if (a.out.dtype == DType::kE4M3) {
    std::vector<float> rows(static_cast<size_t>(a.num_rows * a.width));
    RmsNormArgs plain = a;
    plain.out = rows.data();
    if (absl::Status s = RmsNorm(ctx, plain); !s.ok()) return s;
    return QuantizeRows(ctx, {.x = rows.data(), .out = a.out, .num_rows = a.num_rows, .width = a.width});
  }
  for (int64_t i = 0; i < a.num_rows; ++i) {
    float* r = a.residual + i * a.width;
    double sum = 0;
    for (int64_t j = 0; j < a.width; ++j) {
      if (a.delta != nullptr) r[j] += a.delta[i * a.width + j];
      sum += static_cast<double>(r[j]) * r[j];
    }
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(a.width) + a.eps);
    for (int64_t j = 0; j < a.width; ++j) a.out[i * a.width + j] = static_cast<float>(r[j] * scale * a.weight[j]);
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
