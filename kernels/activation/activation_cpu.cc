#include <vector>

#include "kernels/activation/activation_isa.h"
#include "kernels/activation/activation_validate.h"
#include "kernels/common/parallel.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::cpu {

absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) {
  if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
  const ActivationKernels& kernels = ActivationKernelsFor(ctx.isa);
  // 16 Ki outputs are about 10 us: the exponential costs as much as the traffic.
  ParallelRows(ctx, a.num_rows, (int64_t{16} << 10) / a.width, [&](int64_t begin, int64_t end) {
    const bool quantizes = a.out.dtype == DType::kE4M3;
    std::vector<float> row(quantizes ? static_cast<size_t>(a.width) : 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * a.width;
      const float* gate = a.gate_up + 2 * at;
      kernels.silu_mul(gate, gate + a.width, quantizes ? row.data() : a.out + at, a.width);
      if (quantizes) QuantizeRow(row.data(), a.width, a.out, i, a.num_rows);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
