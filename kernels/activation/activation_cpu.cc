#include "kernels/activation/activation_isa.h"
#include "kernels/activation/activation_validate.h"
#include "kernels/common/parallel.h"

namespace spl::kernels::cpu {

absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) {
  if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
  const ActivationKernels& kernels = ActivationKernelsFor(ctx.isa);
  // 16 Ki outputs are about 10 us: the exponential costs as much as the traffic.
  ParallelRows(ctx, a.num_rows, (int64_t{16} << 10) / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* gate = a.gate_up + i * 2 * a.width;
      kernels.silu_mul(gate, gate + a.width, a.out + i * a.width, a.width);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
