#include "kernels/activation/activation_validate.h"
#include "kernels/common/status.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels {

absl::Status ValidateSiluMul(const SiluMulArgs& a) {
  if (a.num_rows < 0 || a.width <= 0) return InvalidCall("SiluMul: shape [", a.num_rows, ", ", a.width, "]");
  if (a.num_rows > 0 && (a.gate_up.data == nullptr || a.out.data == nullptr))
    return InvalidCall("SiluMul: null tensor");
  return ValidateE4M3(a.out, "SiluMul");
}

}  // namespace spl::kernels
