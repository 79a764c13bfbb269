// Element types of tensors, and the two 16-bit floats that g++ 12 has no type for; e4m3.h has the 8-bit one.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace spl::kernels {

// kE4M3 and kInt4 are types of weight matrices, and come with scales (gemm/gemm.h). Inputs of products may be kE4M3,
// too (quantize/quantize_rows.h), and K and V (common/kv_pool.h).
enum class DType : uint8_t { kF32, kBF16, kF16, kE4M3, kInt4 };

constexpr bool IsQuantizedType(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kInt4; }

// Bytes of `count` elements, which is even for kInt4.
constexpr int64_t DTypeRowBytes(DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return 4 * count;
    case DType::kBF16:
    case DType::kF16:
      return 2 * count;
    case DType::kE4M3:
      return count;
    case DType::kInt4:
      return count / 2;
  }
  return 0;
}

// Bytes of an element; 0 for kInt4, two of which share a byte.
constexpr size_t DTypeBytes(DType dtype) { return static_cast<size_t>(DTypeRowBytes(dtype, 1)); }

constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kE4M3:
      return "fp8";
    case DType::kInt4:
      return "int4";
  }
  return "?";
}

struct bf16 {
  uint16_t bits;
};

constexpr float ToFloat(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
constexpr bf16 ToBf16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

constexpr float HalfToFloat(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exp = (h >> 10) & 0x1fu;
  uint32_t man = h & 0x3ffu;
  if (exp == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (man << 13));
  if (exp == 0) {
    if (man == 0) return std::bit_cast<float>(sign);
    exp = 1;
    while ((man & 0x400u) == 0) {
      man <<= 1;
      --exp;  // wraps below zero on purpose: only exp + 112 is used
    }
    man &= 0x3ffu;
  }
  return std::bit_cast<float>(sign | ((exp + 112u) << 23) | (man << 13));
}

}  // namespace spl::kernels
