#include "kernels/kv_copy/align_copy_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

SPLICE_INLINE void StoreAs(void* p, DType dtype, int64_t at, F v, int n) {
  if (dtype == DType::kF32) {
    StorePartial(static_cast<float*>(p) + at, v, n);
  } else {
    StoreBf16(static_cast<bf16*>(p) + at, v, n);
  }
}

void RotateRows(const void* from, DType dtype, int32_t num_tokens, int32_t width, const float* cos, const float* sin,
                int32_t half, void* to) {
  for (int32_t c = 0; c < half; c += kLanes) {  // the angles stay in registers for all tokens
    const int n = half - c < kLanes ? half - c : kLanes;
    const F cs = LoadPartial(cos + c, n), sn = LoadPartial(sin + c, n);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t low = t * width + c, high = low + half;
      const F x = LoadAs(from, dtype, low, n), y = LoadAs(from, dtype, high, n);
      StoreAs(to, dtype, low, Sub(Mul(x, cs), Mul(y, sn)), n);
      StoreAs(to, dtype, high, Fma(x, sn, Mul(y, cs)), n);
    }
  }
  for (int32_t c = 2 * half; c < width; c += kLanes) {
    const int n = width - c < kLanes ? width - c : kLanes;
    for (int64_t t = 0; t < num_tokens; ++t)
      StoreAs(to, dtype, t * width + c, LoadAs(from, dtype, t * width + c, n), n);
  }
}

}  // namespace

extern const AlignCopyKernels kAlignCopy;
const AlignCopyKernels kAlignCopy = {RotateRows};

}  // namespace spl::kernels::cpu::SPLICE_ISA
