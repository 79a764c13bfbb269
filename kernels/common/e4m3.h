// The 8-bit float e4m3 (OCP "8-bit Floating Point Specification", E4M3): sign, 4 bits of exponent with bias 7, 3 bits
// of mantissa. The largest value is 448, subnormals are multiples of 2^-9, there is no infinity, and 0x7f and 0xff are
// NaN. bf16 and f16 hold every value exactly.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace spl::kernels {

inline constexpr float kE4M3Max = 448.0f;

constexpr bool IsE4M3Nan(uint8_t code) { return (code & 0x7f) == 0x7f; }

constexpr float E4M3ToFloat(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7f;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// Rounds to nearest, ties to even; beyond 448, and infinity, to 448. NaN stays NaN.
constexpr uint8_t FloatToE4M3(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80);
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7e);  // 448 and above
  if (magnitude <
      0x3c800000u) {  // below 2^-6: the addition leaves multiples of 2^-9, and its result's low bits are them
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) & 0xf));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

inline constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) values[static_cast<size_t>(code)] = E4M3ToFloat(static_cast<uint8_t>(code));
  return values;
}();

}  // namespace spl::kernels
