#include "kernels/norm/norm_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

SPLICE_INLINE F AddDelta(float* residual, const float* delta, int64_t at, int n) {
  F x = LoadPartial(residual + at, n);
  if (delta != nullptr) {
    x = Add(x, LoadPartial(delta + at, n));
    StorePartial(residual + at, x, n);
  }
  return x;
}

// The order of summation depends on the width alone: four chains over whole vectors, then the tail.
void RmsNormRow(float* residual, const float* delta, const float* weight, float* out, int64_t width, float eps) {
  constexpr int kChains = 4;
  F sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = Zero();
  int64_t j = 0;
  for (; j + kChains * kLanes <= width; j += kChains * kLanes) {
    SPLICE_UNROLL
    for (int c = 0; c < kChains; ++c) {
      const F x = AddDelta(residual, delta, j + c * kLanes, kLanes);
      sums[c] = Fma(x, x, sums[c]);
    }
  }
  for (; j < width; j += kLanes) {
    const F x = AddDelta(residual, delta, j, width - j < kLanes ? static_cast<int>(width - j) : kLanes);
    sums[0] = Fma(x, x, sums[0]);
  }
  const float sum = ReduceAdd(Add(Add(sums[0], sums[1]), Add(sums[2], sums[3])));
  const F scale = Set1(1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps));
  for (j = 0; j + kLanes <= width; j += kLanes) {
    Store(out + j, Mul(Mul(Load(residual + j), scale), Load(weight + j)));
  }
  if (const int n = static_cast<int>(width - j); n > 0) {
    StorePartial(out + j, Mul(Mul(LoadPartial(residual + j, n), scale), LoadPartial(weight + j, n)), n);
  }
}

}  // namespace

extern const NormKernels kNorm;
const NormKernels kNorm = {RmsNormRow};

}  // namespace spl::kernels::cpu::SPLICE_ISA
