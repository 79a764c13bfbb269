#include <cmath>

#include "kernels/activation/activation_validate.h"

namespace spl::kernels::ref {

absl::Status SiluMul(const KernelContext&, const SiluMulArgs& a) {
  if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
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
