// Sums of weights (sampling_math.h) on the device, without 64-bit shifts and additions for each. Included by .cu files
// only.
#pragma once

#include "kernels/sampling/sampling_math.h"

namespace spl::kernels::cuda::sample {

// The sum of WeightOfExponent(t) over at most kMost exponents. A weight is taken apart into its upper and its lower 20
// bits, each as the fraction of a float between 2^23 and 2^24 that rounding down has made whole. The bits of these
// floats are added up, and Total takes off what 2^23 added each time.
struct WeightSum {
  static constexpr uint32_t kMost = 4095;  // times 2^20, the most that one adds to a sum, is below 2^32
  uint32_t high = 0, low = 0;

  __device__ __forceinline__ void Add(float t) {
    constexpr float kHalf = 1048576.0f, kBase = 8388608.0f;  // 2^(kWeightBits / 2), 2^23
    static_assert(kWeightBits == 40);
    const sampling::PowerOf2 e(t);
    const float w = __uint_as_float(e.number + (e.exponent << 23));  // 2^t, as an exact number
    const float up = __fmaf_rd(w, kHalf, kBase);
    const float rest = __fmaf_rn(w, kHalf, -__fsub_rn(up, kBase));  // exact, in [0, 1)
    high += __float_as_uint(up);
    low += __float_as_uint(__fmaf_rd(rest, kHalf, kBase));
  }
  // `num`: of Add's calls.
  __device__ __forceinline__ uint64_t Total(uint32_t num) const {
    const uint32_t bases = num * 0x4b000000u;  // bits of 2^23
    return (static_cast<uint64_t>(high - bases) << (kWeightBits / 2)) + (low - bases);
  }
};

}  // namespace spl::kernels::cuda::sample
