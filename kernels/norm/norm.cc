#include "kernels/common/status.h"
#include "kernels/norm/norm_validate.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels {

absl::Status ValidateRmsNorm(const RmsNormArgs& a) {
  if (a.num_rows < 0 || a.width <= 0) return InvalidCall("RmsNorm: shape [", a.num_rows, ", ", a.width, "]");
  if (a.num_rows == 0) return absl::OkStatus();
  if (a.residual == nullptr || a.weight == nullptr || a.out.data == nullptr) return InvalidCall("RmsNorm: null tensor");
  if (a.out.data == a.residual) return InvalidCall("RmsNorm: out aliases residual");
  if (!(a.eps >= 0)) return InvalidCall("RmsNorm: eps is ", a.eps);
  return ValidateE4M3(a.out, "RmsNorm");
}

}  // namespace spl::kernels
