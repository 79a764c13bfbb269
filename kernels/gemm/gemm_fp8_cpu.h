// Products with FP8 weights on the CPU.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm_scaled_cpu.h"

namespace spl::kernels::cpu {

// Packed codes (gemm_fp8_isa.h), one byte an element.
class Fp8Weight final : public ScaledWeight {
 public:
  // `round_x`: rows of x are rounded to bf16, as they are for bf16 weights. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<LinearWeight>> Pack(const WeightView& view, bool round_x);

 private:
  Fp8Weight(const WeightView& view, bool round_x) : ScaledWeight(view, round_x, kBf16PairElements) {}
  void Fill(const WeightView& view);
};

// Linear with an Fp8Weight. The order of a row's sums does not depend on the number of rows or threads. Unimplemented:
// the weight rounds x, and ctx.isa has no bf16 product.
absl::Status RunFp8(const KernelContext& ctx, const LinearArgs& args, const Fp8Weight& weight);

}  // namespace spl::kernels::cpu
