#include "kernels/moe/moe_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

void CombineRow(const float* y, const int32_t* places, const float* weights, int32_t top_k, int64_t width, float* out) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const int n = width - j < kLanes ? static_cast<int>(width - j) : kLanes;
    F sum = Zero();
    for (int32_t k = 0; k < top_k; ++k) sum = Fma(Set1(weights[k]), LoadPartial(y + places[k] * width + j, n), sum);
    StorePartial(out + j, sum, n);
  }
}

}  // namespace

extern const MoeKernels kMoe;
const MoeKernels kMoe = {CombineRow};

}  // namespace spl::kernels::cpu::SPLICE_ISA
