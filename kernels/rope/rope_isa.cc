#include "kernels/rope/rope_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

// 1 / sqrt(mean(in²) + eps). The order of summation depends on the width alone.
SPLICE_INLINE float RmsScale(const float* in, int32_t width, float eps) {
  F sum = Zero();
  for (int32_t c = 0; c < width; c += kLanes) {
    const F x = LoadPartial(in + c, width - c < kLanes ? width - c : kLanes);
    sum = Fma(x, x, sum);
  }
  return 1.0f / __builtin_sqrtf(ReduceAdd(sum) / static_cast<float>(width) + eps);
}

void Rotate(const float* in, const float* weight, float eps, const float* cos, const float* sin, int32_t half,
            float* out) {
  const F scale = weight != nullptr ? Set1(RmsScale(in, 2 * half, eps)) : Zero();
  for (int32_t c = 0; c < half; c += kLanes) {
    const int n = half - c < kLanes ? half - c : kLanes;
    F x = LoadPartial(in + c, n), y = LoadPartial(in + half + c, n);
    if (weight != nullptr) {
      x = Mul(Mul(x, scale), LoadPartial(weight + c, n));
      y = Mul(Mul(y, scale), LoadPartial(weight + half + c, n));
    }
    const F cs = LoadPartial(cos + c, n), sn = LoadPartial(sin + c, n);
    StorePartial(out + c, Sub(Mul(x, cs), Mul(y, sn)), n);
    StorePartial(out + half + c, Fma(x, sn, Mul(y, cs)), n);
  }
}

void StoreRow(const float* in, int32_t width, DType dtype, int32_t slot, void* half_page) {
  const int64_t at = static_cast<int64_t>(slot) * width;
  for (int32_t c = 0; c < width; c += kLanes) {
    const int n = width - c < kLanes ? width - c : kLanes;
    const F v = LoadPartial(in + c, n);
    if (dtype == DType::kF32) {
      StorePartial(static_cast<float*>(half_page) + at + c, v, n);
    } else {
      StoreBf16(static_cast<bf16*>(half_page) + at + c, v, n);
    }
  }
}

}  // namespace

extern const RopeKernels kRope;
const RopeKernels kRope = {Rotate, StoreRow};

}  // namespace spl::kernels::cpu::SPLICE_ISA
