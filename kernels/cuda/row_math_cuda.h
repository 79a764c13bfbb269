// Arithmetic of RMSNorm and SiLU that their own kernels share with products that do it on the way: both give the same
// bits, whatever the compiler fuses elsewhere. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

namespace spl::kernels::cuda {

__device__ __forceinline__ float AddSquares(float sum, float4 x) {
  return __fadd_rn(sum, fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.x, x.x, __fmul_rn(x.y, x.y)))));
}
__device__ __forceinline__ float NormScale(float squares, int width, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(squares, static_cast<float>(width)), eps));
}
__device__ __forceinline__ float4 Normed(float4 x, float scale, float4 weight) {
  return {__fmul_rn(__fmul_rn(x.x, scale), weight.x), __fmul_rn(__fmul_rn(x.y, scale), weight.y),
          __fmul_rn(__fmul_rn(x.z, scale), weight.z), __fmul_rn(__fmul_rn(x.w, scale), weight.w)};
}

__device__ __forceinline__ float SiluMulOf(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, __expf(-gate))), up);
}

}  // namespace spl::kernels::cuda
