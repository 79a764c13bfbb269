// Device code of both FP8 products: their parameters, the widening of codes, and the storing of results.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/cuda_types.h"
#include "kernels/gemm/fp8_gemm_cuda.h"

namespace spl::kernels::cuda {

struct Fp8GemmParams {
  const __nv_bfloat16* x;
  const uint8_t* w;
  const float* scales;
  const float* bias;
  void* y;
  int64_t out, in, y_stride;
  int num_rows, num_groups;
  bool y_is_f32;
};

// Args: Fp8GemmArgs or Int4GemmArgs. True if the arguments meet what both ask for: all but their columns and groups.
template <typename Args>
bool ServedCodes(const Args& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return a.num_rows > 0 && a.in_features > 0 && a.out_features > 0 && a.in_features <= (1 << 30) &&
         a.out_features <= (1 << 30) && a.num_rows <= (1 << 20) && aligned(a.x) && aligned(a.codes) &&
         (a.y_dtype == DType::kF32 || a.y_dtype == DType::kBF16);
}
// True if the arguments meet fp8_gemm_cuda.h. small_groups: scale groups are any multiple of 32 columns.
inline bool ServedFp8(const Fp8GemmArgs& a, bool small_groups = false) {
  return ServedCodes(a) && a.in_features % 16 == 0 &&
         (a.scale_group == 0 || a.scale_group == kFp8Group || (small_groups && a.scale_group % kScaleGroupStep == 0));
}

// With a contiguous y.
template <typename Args>
Fp8GemmParams ToCodesParams(const Args& a) {
  return {.x = static_cast<const __nv_bfloat16*>(a.x),
          .w = a.codes,
          .scales = a.scales,
          .bias = a.bias,
          .y = a.y,
          .out = a.out_features,
          .in = a.in_features,
          .y_stride = a.out_features,
          .num_rows = static_cast<int>(a.num_rows),
          .num_groups = a.scale_group == 0 ? 1 : static_cast<int>((a.in_features + a.scale_group - 1) / a.scale_group),
          .y_is_f32 = a.y_dtype == DType::kF32};
}
inline Fp8GemmParams ToFp8Params(const Fp8GemmArgs& a) {
  Fp8GemmParams p = ToCodesParams(a);
  if (a.y_stride != 0) p.y_stride = a.y_stride;
  return p;
}

// Word q of 16 codes in the order of ArrangeFp8Codes. first: columns 2 q and 2 q + 1 in its lower two bytes; second:
// 2 q + 8 and 2 q + 9.
__device__ __forceinline__ uint32_t ArrangedFp8Word(uint32_t first, uint32_t second) {
  return __byte_perm(second, first, 0x5140);
}

// Widens a word of four codes (ArrangeFp8Codes) to two pairs of bf16: columns 2 q, 2 q + 1 and 2 q + 8, 2 q + 9, as the
// operands of an mma have them. The exponents are rebased by an exact product with 2^120, which makes normal values of
// subnormal codes, too.
__device__ __forceinline__ void WidenFp8Word(uint32_t word, uint32_t& low, uint32_t& high) {
  const auto rebase = [](uint32_t small) {
    const __nv_bfloat162 by = __floats2bfloat162_rn(0x1p120f, 0x1p120f);
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&small), by);
    return *reinterpret_cast<const uint32_t*>(&value);
  };
  low = rebase((word & 0x80008000u) | (word >> 4 & 0x07f007f0u));
  high = rebase((word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u));
}

__device__ __forceinline__ void StoreFp8Result(const Fp8GemmParams& p, int row, int64_t feature, float sum) {
  if (p.bias != nullptr) sum += p.bias[feature];
  const int64_t at = row * p.y_stride + feature;
  if (p.y_is_f32) {
    static_cast<float*>(p.y)[at] = sum;
  } else {
    static_cast<__nv_bfloat16*>(p.y)[at] = FromF<__nv_bfloat16>(sum);
  }
}

}  // namespace spl::kernels::cuda
