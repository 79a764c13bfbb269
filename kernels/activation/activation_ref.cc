#include <cmath>
#include <vector>

#include "kernels/activation/activation_validate.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::ref {

absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) {
  if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
  if (a.out.dtype == DType::kE4M3) {
    std::vector<float> rows(static_cast<size_t>(a.num_rows * a.width));
    SiluMulArgs plain = a;
    plain.out = rows.data();
    if (absl::Status s = SiluMul(ctx, plain); !s.ok()) return s;
    return QuantizeRows(ctx, {.x = rows.data(), .out = a.out, .num_rows = a.num_rows, .width = a.width});
  }
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const float* gate = a.gate_up + i * 2 * a.width;
    const float* up = gate + a.width;
    for (int64_t j = 0; j < a.width; ++j) {
      const double g = gate[j];
      a.out[i * a.width + j] = static_cast<float>(g / (1.0 + std::exp(-g)) * up[j]);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
