#include "kernels/fused_linear/fused_linear.h"

#include <string>
#include <vector>

#include "kernels/activation/activation.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"
#include "kernels/norm/norm.h"

namespace spl::kernels {
namespace {

template <typename Args>
using Operation = absl::Status (*)(const KernelContext&, const Args&);

absl::Status Compose(const KernelContext& ctx, const FusedLinearArgs& a, Operation<RmsNormArgs> rms_norm,
                     Operation<LinearArgs> linear, Operation<SiluMulArgs> silu_mul) {
  if (absl::Status s = ValidateFusedLinear(a); !s.ok()) return s;
  LinearArgs product = a.linear;
  const int64_t rows = product.num_rows, in = product.weight->in_features(), out = product.weight->out_features();
  std::vector<float> normed, result;
  if (a.fusion.norm.weight != nullptr) {
    normed.resize(static_cast<size_t>(rows * in));
    const absl::Status s =
        rms_norm(ctx, {.residual = const_cast<float*>(static_cast<const float*>(a.linear.x)),  // there is no delta
                       .weight = a.fusion.norm.weight,
                       .out = normed.data(),
                       .num_rows = rows,
                       .width = in,
                       .eps = a.fusion.norm.eps});
    if (!s.ok()) return s;
    product.x = normed.data();
  }
  if (a.fusion.silu_mul || a.fusion.adds) {
    result.resize(static_cast<size_t>(rows * out));
    product.y = result.data();
  }
  if (absl::Status s = linear(ctx, product); !s.ok()) return s;
  if (a.fusion.silu_mul)
    return silu_mul(ctx, {.gate_up = result.data(), .out = a.linear.y, .num_rows = rows, .width = out / 2});
  if (a.fusion.adds) {
    for (int64_t i = 0; i < rows * out; ++i) a.linear.y[i] += result[i];
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateFusedLinear(const FusedLinearArgs& a) {
  if (absl::Status s = ValidateLinear(a.linear); !s.ok()) return s;
  if (a.fusion.norm.weight != nullptr && a.linear.x.dtype != DType::kF32)
    return InvalidCall("FusedLinear: a norm of rows in ", std::string(DTypeName(a.linear.x.dtype)));
  if (a.fusion.norm.weight != nullptr && !(a.fusion.norm.eps >= 0))
    return InvalidCall("FusedLinear: eps is ", a.fusion.norm.eps);
  if (a.fusion.adds && (a.fusion.silu_mul || a.linear.y.dtype != DType::kF32))
    return InvalidCall("FusedLinear: only a product in f32 is added to y");
  if (a.fusion.silu_mul && a.linear.weight->out_features() % 2 != 0)
    return InvalidCall("FusedLinear: gate and up have ", a.linear.weight->out_features(), " features");
  return absl::OkStatus();
}

namespace ref {
absl::Status FusedLinear(const KernelContext& ctx, const FusedLinearArgs& a) {
  return Compose(ctx, a, &RmsNorm, &Linear, &SiluMul);
}
}  // namespace ref
namespace cpu {
absl::Status FusedLinear(const KernelContext& ctx, const FusedLinearArgs& a) {
  return Compose(ctx, a, &RmsNorm, &Linear, &SiluMul);
}
}  // namespace cpu

}  // namespace spl::kernels
