#include "kernels/activation/linear_silu_mul.h"

#include "kernels/activation/activation_validate.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels {

absl::Status ValidateLinearSiluMul(const LinearSiluMulArgs& a) {
  if (absl::Status s = ValidateLinear(a.Product()); !s.ok()) return s;
  if (a.weight->out_features() % 2 != 0) return InvalidCall("LinearSiluMul: ", a.weight->out_features(), " features");
  return ValidateSiluMul(a.Activation());
}

absl::Status ref::LinearSiluMul(const KernelContext& ctx, const LinearSiluMulArgs& a) {
  if (absl::Status s = ValidateLinearSiluMul(a); !s.ok()) return s;
  if (absl::Status s = Linear(ctx, a.Product()); !s.ok()) return s;
  return SiluMul(ctx, a.Activation());
}

absl::Status cpu::LinearSiluMul(const KernelContext& ctx, const LinearSiluMulArgs& a) {
  if (absl::Status s = ValidateLinearSiluMul(a); !s.ok()) return s;
  if (absl::Status s = Linear(ctx, a.Product()); !s.ok()) return s;
  return SiluMul(ctx, a.Activation());
}

}  // namespace spl::kernels
