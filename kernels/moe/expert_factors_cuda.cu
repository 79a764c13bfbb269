// Experts in codes: which are served, and what stands beside their codes (host code).
#include <bit>

#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/gemm/int4_gemm_device.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {

bool AreExpertCodesServed(const GroupedWeightView& w) {
  if (w.out_features % 8 != 0) return false;
  if (w.dtype == DType::kInt4) return IsInt4Served(w.in_features, w.scale_group);
  return w.dtype == DType::kE4M3 && w.in_features % 16 == 0 && (w.scale_group == 0 || w.scale_group == kFp8Group);
}

std::vector<uint32_t> ExpertFactors(const GroupedWeightView& w) {
  constexpr uint8_t kSymmetric = 8;
  const int64_t groups = w.expert(0).num_scale_groups(), out = w.out_features;
  const int64_t words = w.dtype == DType::kInt4 ? 2 : 1;
  std::vector<uint32_t> factors(static_cast<size_t>(w.num_experts * groups * out * words));
  for (int64_t e = 0; e < w.num_experts; ++e) {
    for (int64_t n = 0; n < out; ++n) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t from = (e * out + n) * groups + g;
        uint32_t* to = &factors[static_cast<size_t>(((e * groups + g) * out + n) * words)];
        to[0] = std::bit_cast<uint32_t>(w.scales[from]);
        if (words == 2) to[1] = Int4Zero(w.zeros == nullptr ? kSymmetric : w.zeros[from]);
      }
    }
  }
  return factors;
}

}  // namespace spl::kernels::cuda
