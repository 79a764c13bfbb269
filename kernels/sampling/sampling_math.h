// The arithmetic of sampling, the same instruction for instruction on the host and in kernels (sample_tokens.h). Files
// that include it on the host are built with -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/sampling/exponential.h"
#include "kernels/sampling/sample_tokens.h"

#ifdef __CUDACC__
#define SPLICE_SAMPLING __host__ __device__ __forceinline__
#else
#define SPLICE_SAMPLING inline
#endif

namespace spl::kernels::sampling {

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float Add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float Sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float Mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float Div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ uint32_t Bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float FromBits(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint64_t MulHigh(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
#else
inline float Add(float a, float b) { return a + b; }
inline float Sub(float a, float b) { return a - b; }
inline float Mul(float a, float b) { return a * b; }
inline float Div(float a, float b) { return a / b; }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint64_t MulHigh(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
}
#endif

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// A sum with this number has no fraction bits: adding it rounds to the nearest whole number, ties to even. For |x| <
// 2^22.
constexpr float kWholeNumber = 12582912.0f;
// The exponent of a weight, (y - max)·scale in [kMinExponent, 0]; kMinExponent for NaN.
SPLICE_SAMPLING float ExponentOf(float y, float max, float scale) {
  const float t = Mul(Sub(y, max), scale);
  return t > kMinExponent ? t : kMinExponent;
}

// 2^t for an exponent t, in f32 and at most 1 ulp off, exactly 1 at 0: a number in [0.7, 1.5) times 2^exponent.
struct PowerOf2 {
  uint32_t number;    // bits of that number
  uint32_t exponent;  // at most 0, in two's complement

  SPLICE_SAMPLING explicit PowerOf2(float t) {
    const float shifted = Add(t, kWholeNumber);
    const float f = Sub(t, Sub(shifted, kWholeNumber));
    float p = kExp2C6;
    p = Fma(p, f, kExp2C5);
    p = Fma(p, f, kExp2C4);
    p = Fma(p, f, kExp2C3);
    p = Fma(p, f, kExp2C2);
    p = Fma(p, f, kExp2C1);
    number = Bits(Fma(p, f, 1.0f));
    exponent = Bits(shifted) - Bits(kWholeNumber);
  }
};

// floor(2^t · 2^kWeightBits) for an exponent t.
SPLICE_SAMPLING uint64_t WeightOfExponent(float t) {
  const PowerOf2 e(t);
  // The number is mantissa · 2^(its exponent - 150), and the other exponent is at most 0: the shift is in [0, 63].
  const int32_t shift = 127 - static_cast<int32_t>(e.number >> 23) - static_cast<int32_t>(e.exponent);
  return (static_cast<uint64_t>((e.number & 0x7fffffu) | 0x800000u) << (kWeightBits - 23)) >> shift;
}

SPLICE_SAMPLING uint64_t WeightOf(float y, float max, float scale) {
  return WeightOfExponent(ExponentOf(y, max, scale));
}

// A key whose unsigned order is the order of the numbers. NaN has the lowest key, 0; -0 and +0 have the same.
SPLICE_SAMPLING uint32_t OrderedKey(float y) {
  if (y != y) return 0;
  const uint32_t bits = Bits(Add(y, 0.0f));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// The number that has this key; NaN for a key that none has.
SPLICE_SAMPLING float OfKey(uint32_t key) { return FromBits((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key); }

SPLICE_SAMPLING bool IsFinite(float x) { return (Bits(x) & 0x7f800000u) != 0x7f800000u; }

// The logit of a token that has an edit.
SPLICE_SAMPLING float Edited(float x, const TokenEdit& edit, float repetition, float presence, float frequency,
                             bool bans_ends) {
  float y = Add(x, edit.bias);
  if (bans_ends && (edit.flags & TokenEdit::kEnd) != 0) y = FromBits(0xff800000u);
  if (repetition != 1.0f && (edit.count > 0 || (edit.flags & TokenEdit::kInPrompt) != 0))
    y = y > 0 ? Div(y, repetition) : Mul(y, repetition);
  if (edit.count > 0) y = Sub(y, Add(presence, Mul(frequency, static_cast<float>(edit.count))));
  return y;
}

// ceil(top_p · total) for TopPFraction(top_p), at least 1.
SPLICE_SAMPLING uint64_t TopPTarget(uint64_t fraction, uint64_t total) {
  return MulHigh(fraction, total) + (fraction * total != 0 ? 1 : 0);
}
// A whole number in [0, total) from 64 random bits.
SPLICE_SAMPLING uint64_t DrawBelow(uint64_t random, uint64_t total) { return MulHigh(random, total); }

// The functions below turn a row's parameters into those of the kernels, on the host, before any variant runs.

// log2(e) / temperature; 0: greedy.
inline float ScaleOf(float temperature) {
  if (temperature == 0) return 0;
  const double scale = 1.4426950408889634 / static_cast<double>(temperature);
  constexpr double kMost = std::numeric_limits<float>::max();
  return static_cast<float>(scale < kMost ? scale : kMost);
}
constexpr float kLog2E = 1.4426950408889634f;
// The least weight that min_p keeps; at least 1, so that a token without weight is never drawn.
inline uint64_t MinWeight(float min_p) {
  const double least = std::ceil(std::ldexp(static_cast<double>(min_p), kWeightBits));
  return least < 1 ? 1 : static_cast<uint64_t>(least);
}
// top_p · 2^64 rounded up; 0: all are kept.
inline uint64_t TopPFraction(float top_p) {
  return top_p >= 1.0f ? 0 : static_cast<uint64_t>(std::ceil(std::ldexp(static_cast<double>(top_p), 64)));
}

}  // namespace spl::kernels::sampling
