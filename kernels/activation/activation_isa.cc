#include "kernels/activation/activation_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

// x / (1 + exp(-x)) · up. Exp2 clamps, so that a very negative x gives about x · 2^-126 and never NaN.
SPLICE_INLINE F SiluTimes(F x, F up) {
  const F e = Exp2(Mul(x, Set1(-1.4426950408889634f)));
  return Mul(Div(x, Add(Set1(1.0f), e)), up);
}

void SiluMulRow(const float* gate, const float* up, float* out, int64_t width) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) Store(out + j, SiluTimes(Load(gate + j), Load(up + j)));
  if (const int n = static_cast<int>(width - j); n > 0) {
    StorePartial(out + j, SiluTimes(LoadPartial(gate + j, n), LoadPartial(up + j, n)), n);
  }
}

}  // namespace

extern const ActivationKernels kActivation;
const ActivationKernels kActivation = {SiluMulRow};

}  // namespace spl::kernels::cpu::SPLICE_ISA
