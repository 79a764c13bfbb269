// Rows of K and V in e4m3: a row of a page has codes and one scale, a power of two. A value is code · 2^(scale − 127),
// which is how OCP's "Microscaling Formats (MX)" specification defines a scale of type E8M0. Codes are floats, so a
// finer scale would make no value more precise, and with a power of two bf16 holds every value exactly: widening a page
// loses nothing, and each backend sees the same numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/common/e4m3.h"

namespace spl::kernels {

// The smallest scale is far below what K and V hold, so that subnormal codes are normal in bf16. With the largest the
// greatest value is 57,344; values beyond it become that. kNotFiniteScale: the row has a NaN or an infinity, and all of
// it is read as NaN.
inline constexpr uint8_t kMinRowScale = 16, kMaxRowScale = 134, kNotFiniteScale = 135;

// The scale of a row whose largest magnitude is `amax`: the smallest with amax <= 448 · 2^(scale − 127). amax is NaN or
// infinite if a value is.
constexpr uint8_t RowScaleOf(float amax) {
  const uint32_t bits = std::bit_cast<uint32_t>(amax) & 0x7fffffffu;
  if (bits >= 0x7f800000u) return kNotFiniteScale;
  // 448 is 1.75 · 2^8.
  const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return static_cast<uint8_t>(std::clamp(exponent, int{kMinRowScale}, int{kMaxRowScale}));
}

// 2^(scale − 127); NaN for kNotFiniteScale and for bytes that RowScaleOf does not return above it.
constexpr float RowScaleValue(uint8_t scale) {
  return scale > kMaxRowScale ? std::bit_cast<float>(0x7fc00000u)
                              : std::bit_cast<float>(static_cast<uint32_t>(scale) << 23);
}
// 2^(127 − scale), exact; for scales up to kNotFiniteScale.
constexpr float InverseRowScale(uint8_t scale) { return std::bit_cast<float>((254u - scale) << 23); }

// Writes the codes of x[0 .. count) and returns their scale. One rounding a value, to nearest, ties to even.
inline uint8_t QuantizeRow(const float* x, int32_t count, uint8_t* codes) {
  float amax = 0;
  bool finite = true;
  for (int32_t c = 0; c < count; ++c) {
    amax = std::max(amax, std::fabs(x[c]));
    finite = finite && std::isfinite(x[c]);
  }
  const uint8_t scale = finite ? RowScaleOf(amax) : kNotFiniteScale;
  const float inverse = InverseRowScale(scale);
  for (int32_t c = 0; c < count; ++c) codes[c] = FloatToE4M3(x[c] * inverse);
  return scale;
}

inline void WidenRow(const uint8_t* codes, uint8_t scale, int32_t count, float* x) {
  const float value = RowScaleValue(scale);
  for (int32_t c = 0; c < count; ++c) x[c] = kE4M3Values[codes[c]] * value;
}

}  // namespace spl::kernels
