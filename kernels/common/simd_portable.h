// Any machine: 4 lanes as a compiler vector (SSE2, NEON, or scalar code). Included by simd.h only.
#pragma once

namespace spl::kernels::cpu::SPLICE_ISA {

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
inline constexpr int kLanes = 4;
inline constexpr int kTileColumns = 2;  // 6 x 2 sums, 2 operands, 1 broadcast = 15 of 16 registers

SPLICE_INLINE F Zero() { return F{0, 0, 0, 0}; }
SPLICE_INLINE F Set1(float x) { return F{x, x, x, x}; }
SPLICE_INLINE F LoadPartial(const float* p, int n) {
  F v = Zero();
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
SPLICE_INLINE void StorePartial(float* p, F v, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
SPLICE_INLINE F Load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
SPLICE_INLINE void Store(float* p, F v) { __builtin_memcpy(p, &v, sizeof(v)); }
SPLICE_INLINE F Add(F a, F b) { return a + b; }
SPLICE_INLINE F Sub(F a, F b) { return a - b; }
SPLICE_INLINE F Mul(F a, F b) { return a * b; }
SPLICE_INLINE F Div(F a, F b) { return a / b; }
SPLICE_INLINE F Blend(I mask, F a, F b) {
  return reinterpret_cast<F>((mask & reinterpret_cast<I>(a)) | (~mask & reinterpret_cast<I>(b)));
}
SPLICE_INLINE F Max(F a, F b) { return Blend(a > b, a, b); }
SPLICE_INLINE F Min(F a, F b) { return Blend(a < b, a, b); }
SPLICE_INLINE F Fma(F a, F b, F c) { return a * b + c; }
// |a| < 2^22: adding 1.5 · 2^23 leaves no fraction bits, so the addition itself rounds to nearest even.
SPLICE_INLINE F Round(F a) { return (a + Set1(12582912.0f)) - Set1(12582912.0f); }
// n whole, in [-126, 126]: added to the exponent field. Lanes that nobody reads (behind the end of a row) may hold any
// n up to 2^31: unsigned sums wrap.
SPLICE_INLINE F ScaleByPowerOfTwo(F a, F n) {
  return reinterpret_cast<F>(reinterpret_cast<U>(a) + (reinterpret_cast<U>(__builtin_convertvector(n, I)) << 23));
}
SPLICE_INLINE float ReduceAdd(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
SPLICE_INLINE float FirstLane(F a) { return a[0]; }
SPLICE_INLINE float ReduceMax(F a) {
  const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
  return x > y ? x : y;
}

SPLICE_INLINE F Select(uint32_t bits, F a, F b) {
  const I lane = {1, 2, 4, 8};
  const int32_t x = static_cast<int32_t>(bits);
  return Blend((I{x, x, x, x} & lane) == lane, a, b);
}

SPLICE_INLINE F LoadBf16(const bf16* p, int n) {
  F v = Zero();
  for (int i = 0; i < n; ++i) v[i] = __builtin_bit_cast(float, static_cast<uint32_t>(p[i].bits) << 16);
  return v;
}
SPLICE_INLINE F LoadF16(const uint16_t* p, int n) {
  F v = Zero();
  for (int i = 0; i < n; ++i) v[i] = HalfToFloat(p[i]);
  return v;
}
SPLICE_INLINE void StoreBf16(bf16* p, F v, int n) {
  for (int i = 0; i < n; ++i) p[i] = ToBf16(v[i]);
}

SPLICE_INLINE F LoadWords(const void* p, int n) {
  F v = Zero();
  __builtin_memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
}
SPLICE_INLINE F LowBf16(F words) { return reinterpret_cast<F>(reinterpret_cast<I>(words) << 16); }
SPLICE_INLINE F HighBf16(F words) {
  const I mask = I{} + static_cast<int32_t>(0xffff0000u);
  return reinterpret_cast<F>(reinterpret_cast<I>(words) & mask);
}

// The 2 kLanes e4m3 codes at p: those at even and at odd places.
SPLICE_INLINE void LoadE4M3Pairs(const uint8_t* p, F& even, F& odd) {
  for (int i = 0; i < kLanes; ++i) {
    even[i] = kE4M3Values[p[2 * i]];
    odd[i] = kE4M3Values[p[2 * i + 1]];
  }
}
SPLICE_INLINE F E4M3Byte(F words, int byte) {
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = kE4M3Values[reinterpret_cast<U>(words)[i] >> (8 * byte) & 255];
  return v;
}
SPLICE_INLINE F LoadE4M3(const uint8_t* p, int n) {
  F v = Zero();
  for (int i = 0; i < n; ++i) v[i] = kE4M3Values[p[i]];
  return v;
}
SPLICE_INLINE void StoreE4M3(uint8_t* p, F v, int n) {
  for (int i = 0; i < n; ++i) p[i] = FloatToE4M3(v[i]);
}

// The int4 codes in 2 kLanes bytes at p, those of even and of odd bytes; shift: 0 or 4, which half of a byte.
SPLICE_INLINE void LoadInt4Pairs(const uint8_t* p, int shift, F& even, F& odd) {
  for (int i = 0; i < kLanes; ++i) {
    even[i] = static_cast<float>(p[2 * i] >> shift & 15);
    odd[i] = static_cast<float>(p[2 * i + 1] >> shift & 15);
  }
}

SPLICE_INLINE void Transpose(F (&r)[4]) {
  const F a = r[0], b = r[1], c = r[2], d = r[3];
  SPLICE_UNROLL
  for (int i = 0; i < 4; ++i) r[i] = F{a[i], b[i], c[i], d[i]};
}

SPLICE_INLINE void ReduceAdd4(const F (&v)[4], float* out) {
  for (int i = 0; i < 4; ++i) out[i] = ReduceAdd(v[i]);
}

SPLICE_INLINE void Prefetch(const void* p) { __builtin_prefetch(p); }
SPLICE_INLINE void PrefetchFar(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace spl::kernels::cpu::SPLICE_ISA
