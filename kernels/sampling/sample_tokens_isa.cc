#include "kernels/sampling/sample_tokens_isa.h"

#include "kernels/common/simd.h"
#include "kernels/sampling/exponential.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr float kOneWeight = 1099511627776.0f;  // 2^kWeightBits
// Exponents of -41 and below, whose weights are 0, are in the last bin.
constexpr float kBinsPerExponent = (kExponentBins - 2) / 41.0f;
constexpr float kBinBase = 8388608.0f;  // 2^23

SPLICE_INLINE F LoadUpTo(const float* p, int64_t left) {
  return left >= kLanes ? Load(p) : LoadPartial(p, static_cast<int>(left));
}
SPLICE_INLINE void StoreUpTo(float* p, F x, int64_t left) {
  if (left >= kLanes) {
    Store(p, x);
  } else {
    StorePartial(p, x, static_cast<int>(left));
  }
}

// Rounded once, also on a machine without a fused multiply-add.
SPLICE_INLINE F Fused(F a, F b, F c) {
#if defined(__AVX2__)
  return Fma(a, b, c);
#else
  F r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

// NaN gives sampling::kMinExponent: Max returns its second operand then.
SPLICE_INLINE F Exponent(F y, F max, F scale) { return Max(Mul(Sub(y, max), scale), Set1(sampling::kMinExponent)); }

SPLICE_INLINE F PowerOfTwo(F t) {
  const F n = Round(t);
  const F f = Sub(t, n);
  F p = Set1(sampling::kExp2C6);
  p = Fused(p, f, Set1(sampling::kExp2C5));
  p = Fused(p, f, Set1(sampling::kExp2C4));
  p = Fused(p, f, Set1(sampling::kExp2C3));
  p = Fused(p, f, Set1(sampling::kExp2C2));
  p = Fused(p, f, Set1(sampling::kExp2C1));
  return ScaleByPowerOfTwo(Fused(p, f, Set1(1.0f)), n);
}

float MaxOf(const float* y, int64_t n) {
  F max = Set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) max = Max(Load(y + i), max);  // for a NaN: max stays
  float result = ReduceMax(max);
  for (; i < n; ++i) result = y[i] > result ? y[i] : result;
  return result;
}

void Weigh(const float* y, int64_t n, float max, float scale, float* weights) {
  const F m = Set1(max), s = Set1(scale);
  for (int64_t i = 0; i < n; i += kLanes)
    StoreUpTo(weights + i, PowerOfTwo(Exponent(LoadUpTo(y + i, n - i), m, s)), n - i);
}

void Bin(const float* y, int64_t n, float max, float scale, float* bins) {
  const F m = Set1(max), s = Set1(scale), per = Set1(-kBinsPerExponent), last = Set1(kExponentBins - 1);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F bin = Min(Mul(Exponent(LoadUpTo(y + i, n - i), m, s), per), last);
    StoreUpTo(bins + i, Add(bin, Set1(kBinBase)), n - i);
  }
}

// The sums of doubles below stay exact: 4,096 weights of at most 2^40.
uint64_t Sum(const float* y, const float* weights, int64_t n, float y_min, float min) {
  uint64_t total = 0;
  int64_t i = 0;
#if defined(__AVX512F__)
  __m512i sums = _mm512_setzero_si512();
  for (; i + kLanes <= n; i += kLanes) {
    const F w = Load(weights + i);
    const __mmask16 kept =
        _mm512_cmp_ps_mask(Load(y + i), Set1(y_min), _CMP_GE_OQ) & _mm512_cmp_ps_mask(w, Set1(min), _CMP_GE_OQ);
    const F scaled = _mm512_maskz_mul_ps(kept, w, Set1(kOneWeight));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_castps512_ps256(scaled)));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(scaled, 1)));
  }
  total = static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
#elif defined(__AVX2__)
  __m256d sums[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
  for (; i + kLanes <= n; i += kLanes) {
    const F w = Load(weights + i);
    const F kept =
        _mm256_and_ps(_mm256_cmp_ps(Load(y + i), Set1(y_min), _CMP_GE_OQ), _mm256_cmp_ps(w, Set1(min), _CMP_GE_OQ));
    const F scaled = _mm256_and_ps(kept, Mul(w, Set1(kOneWeight)));
    sums[0] = _mm256_add_pd(sums[0], _mm256_floor_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(scaled))));
    sums[1] = _mm256_add_pd(sums[1], _mm256_floor_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(scaled, 1))));
  }
  double lanes[8];
  _mm256_storeu_pd(lanes, sums[0]);
  _mm256_storeu_pd(lanes + 4, sums[1]);
  for (const double lane : lanes) total += static_cast<uint64_t>(lane);
#endif
  for (; i < n; ++i) {
    if (y[i] >= y_min && weights[i] >= min) total += static_cast<uint64_t>(weights[i] * kOneWeight);
  }
  return total;
}

}  // namespace

extern const SampleTokensKernels kSampleTokens;
const SampleTokensKernels kSampleTokens = {MaxOf, Weigh, Bin, Sum};

}  // namespace spl::kernels::cpu::SPLICE_ISA
