#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/norm/norm_isa.h"
#include "kernels/norm/norm_validate.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::cpu {

absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) {
  if (absl::Status s = ValidateRmsNorm(a); !s.ok()) return s;
  const NormKernels& kernels = NormKernelsFor(ctx.isa);
  // 32 Ki elements are 10 to 20 us of streaming.
  ParallelRows(ctx, a.num_rows, (int64_t{32} << 10) / a.width, [&](int64_t begin, int64_t end) {
    const bool quantizes = a.out.dtype == DType::kE4M3;
    std::vector<float> row(quantizes ? static_cast<size_t>(a.width) : 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * a.width;
      kernels.rms_norm(a.residual + at, a.delta == nullptr ? nullptr : a.delta + at, a.weight,
                       quantizes ? row.data() : a.out + at, a.width, a.eps);
      if (quantizes) QuantizeRow(row.data(), a.width, a.out, i, a.num_rows);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
