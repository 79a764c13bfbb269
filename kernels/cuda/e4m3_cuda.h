// e4m3 on the device: conversion of values, and rows of K and V (common/e4m3_rows.h). Included by .cu files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/e4m3_rows.h"

namespace spl::kernels::cuda {

// The code of a value, as FloatToE4M3; for devices that have no instruction for it.
__device__ __forceinline__ uint32_t E4M3Code(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
  if (magnitude > 0x7f800000u) return sign | 0x7f;
  if (magnitude >= 0x43e00000u) return sign | 0x7e;
  if (magnitude < 0x3c800000u) return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) & 0xf);
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

// Codes of two values, the first in the lower byte.
__device__ __forceinline__ uint32_t E4M3Pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return E4M3Code(first) | E4M3Code(second) << 8;
#endif
}

__device__ __forceinline__ float E4M3Float(uint32_t code) {
  const uint32_t small = (code & 0x80) << 24 | (code & 0x7f) << 20;  // 2^-120 times the value
  return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float(small) * 0x1p120f;
}

// RowScaleOf of a row's largest magnitude, given as the bits of that float.
__device__ __forceinline__ uint32_t RowScaleOfBits(uint32_t amax) {
  if (amax >= 0x7f800000u) return kNotFiniteScale;
  const int exponent = static_cast<int>(amax >> 23) - 8 + ((amax & 0x7fffffu) > 0x600000u ? 1 : 0);
  return static_cast<uint32_t>(min(max(exponent, int{kMinRowScale}), int{kMaxRowScale}));
}
__device__ __forceinline__ float InverseRowScaleOf(uint32_t scale) { return __uint_as_float((254u - scale) << 23); }
__device__ __forceinline__ float RowScaleFloat(uint32_t scale) {
  return scale > kMaxRowScale ? __uint_as_float(0x7fc00000u) : __uint_as_float(scale << 23);
}

// The bits of |x|, whose order is that of the magnitudes, with infinity and NaN above all others.
__device__ __forceinline__ uint32_t Magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
// The largest over a warp; called by all of its lanes.
__device__ __forceinline__ uint32_t WarpLargest(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
#endif
}

// Pairs of f16, which holds every code, from the lower and the upper two codes of a word.
__device__ __forceinline__ uint2 HalfQuad(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint2 pairs;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(codes));
  return pairs;
#else
  // Exponents of f16 count from 8 more.
  const auto half_pair = [](uint32_t pair) {
    const uint32_t small = (pair >> 1 & 0x3f803f80u) | (pair & 0x80008000u);
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&value);
  };
  return {half_pair(__byte_perm(codes, 0, 0x1404)), half_pair(__byte_perm(codes, 0, 0x3424))};
#endif
}
__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Pairs of bf16 that hold 2^-120 times the codes in the high bytes of the two halves of `pair`; its low bytes may hold
// anything. Subnormal codes become subnormal values.
__device__ __forceinline__ uint32_t SmallBf16Pair(uint32_t pair) {
  return (pair >> 4 & 0x07f007f0u) | (pair & 0x80008000u);
}
// Two pairs of bf16 from four codes, in order.
__device__ __forceinline__ uint2 SmallBf16Quad(uint32_t codes) {
  return {SmallBf16Pair(__byte_perm(codes, 0, 0x1404)), SmallBf16Pair(__byte_perm(codes, 0, 0x3424))};
}

// 2^120 times a row's scale: what products of the pairs above are multiplied with.
__device__ __forceinline__ float SmallFactor(uint32_t scale) {
  return scale > kMaxRowScale ? __uint_as_float(0x7fc00000u) : __uint_as_float((scale + 120u) << 23);
}
// The factor that makes the values of a row of the pairs above, twice as bf16. With it, all of a row that is
// not finite becomes NaN.
__device__ __forceinline__ __nv_bfloat162 RowFactor(uint32_t scale) {
  const uint32_t bits = scale > kMaxRowScale ? 0x7fffu : (scale + 120u) << 7;
  const uint32_t twice = bits << 16 | bits;
  return *reinterpret_cast<const __nv_bfloat162*>(&twice);
}
__device__ __forceinline__ uint32_t TimesRowFactor(uint32_t small, __nv_bfloat162 factor) {
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&small), factor);
  return *reinterpret_cast<const uint32_t*>(&value);
}

}  // namespace spl::kernels::cuda
