// x of an int4 product of few rows in shared memory, as digits (skinny_int4_digits_gemm_cuda_sm90.cu). Included by .cu
// files only.
//
// Each 128 columns of a row are multiplied by the power of two that takes their largest number to [2^29, 2^30), and
// rounded to whole numbers: bf16 loses nothing but bits below 2^-30 of the largest. A whole number is four digits of
// base 256, from -128 to 127, which tensor cores multiply with codes exactly.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/gemm/resident_x_sm90.h"

namespace spl::kernels::cuda {

inline constexpr int kDigits = 4;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A line is a digit of a row: line 4 row + digit. A group of a line has eight pieces of 16 bytes: 4 half + c is what
// lane c of a quad multiplies with words 2 half and 2 half + 1 of its codes, each 4 bytes of their low bits and 4 of
// their high bits (ArrangeInt4Codes).
struct DigitX {
  uint32_t pieces;
  float* scales;  // [groups][rows]: the value of the lowest digit's unit; NaN where x is not finite
  int32_t* sums;  // [groups][lines]: of a line's digits
  int rows;

  __device__ int lines() const { return kDigits * rows; }
  __device__ uint32_t Piece(int group, int line, int half, int c) const {
    return pieces + (group * lines() + line) * kResidentGroup + (((half * 4 + c) ^ (line & 1) << 2) * 16);
  }
};

// Byte k of each of four words, as a word: byte i of it is of words[i].
__device__ __forceinline__ uint4 TransposeBytes(const uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

// Writes the digits of eight columns of a group, pairs of bf16, and returns this lane's part of the sums of the two
// lower digits and of the two higher ones: low + 2^16 high. largest: the bits of the group's largest magnitude.
__device__ __forceinline__ int2 StoreDigits(const DigitX& x, int group, int row, const uint4& bits, uint32_t largest) {
  const int lane = threadIdx.x % 16, c = lane / 4, word = lane % 4;
  const uint32_t field = min(283u - (largest >> 7), 253u);  // the exponent of the factor 2^(29 - e)
  const float by = __uint_as_float(field << 23);
  const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t digits[8];  // four of each column
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float value = __uint_as_float(k % 2 == 0 ? pair[k / 2] << 16 : pair[k / 2] & 0xffff0000u);
    // The bytes of the sum, less 128 each, are the lower digits; the highest one has taken what they carry.
    digits[k] = (static_cast<uint32_t>(__float2int_rn(value * by)) + 0x00808080u) ^ 0x00808080u;
  }
  const uint32_t in_low[4] = {digits[0], digits[4], digits[1], digits[5]};
  const uint32_t in_high[4] = {digits[2], digits[6], digits[3], digits[7]};
  const uint4 low = TransposeBytes(in_low), high = TransposeBytes(in_high);
  const uint32_t of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
  int sums[kDigits];
#pragma unroll
  for (int digit = 0; digit < kDigits; ++digit) {
    asm volatile(
        "st.shared.v2.u32 [%0], {%1, %2};" ::"r"(x.Piece(group, kDigits * row + digit, word / 2, c) + word % 2 * 8),
        "r"(of_low[digit]), "r"(of_high[digit])
        : "memory");
    constexpr int kOnes = 0x01010101;
    sums[digit] = __dp4a(static_cast<int>(of_low[digit]), kOnes, __dp4a(static_cast<int>(of_high[digit]), kOnes, 0));
  }
  if (lane == 0) {
    x.scales[group * x.rows + row] = __uint_as_float(largest >= 0x7f80u ? 0x7fc00000u : (254u - field) << 23);
  }
  return {sums[0] + sums[1] * 65536, sums[2] + sums[3] * 65536};
}

template <int kAtOnce, typename Walk>
__device__ __forceinline__ void ConvertGroupsToDigits(const __nv_bfloat16* from, int64_t in, Walk walk,
                                                      const DigitX& x) {
#pragma unroll 1
  for (int done = 0; done < walk.units * x.rows; done += 2 * kAtOnce) {
    uint4 bits[kAtOnce];
    int group[kAtOnce], row[kAtOnce];
    uint32_t most[kAtOnce];
    int2 sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      walk.Next(group[i], row[i]);
      bits[i] = LoadColumns(from, in, group[i], row[i]);
    }
    LargestOf(bits, most);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sums[i] = StoreDigits(x, group[i], row[i], bits[i], most[i]);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i].x += __shfl_xor_sync(0xffffffffu, sums[i].x, step);
        sums[i].y += __shfl_xor_sync(0xffffffffu, sums[i].y, step);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (threadIdx.x % 16 != 0) continue;
      // A digit's sum over 128 columns has 16 bits.
      const int first = static_cast<int16_t>(sums[i].x), third = static_cast<int16_t>(sums[i].y);
      *reinterpret_cast<int4*>(x.sums + group[i] * x.lines() + kDigits * row[i]) =
          int4{first, (sums[i].x - first) >> 16, third, (sums[i].y - third) >> 16};
    }
  }
}

// Converts rows of `in` columns; half a warp converts a group of a row (GroupWalk).
template <int kGroups, int kWarps>
__device__ __forceinline__ void ConvertToDigits(const __nv_bfloat16* from, int64_t in, int chunks, const DigitX& x) {
  const GroupWalk<kGroups, kWarps> walk(chunks, x.rows);
  ConvertAtOnce(walk, [&]<int kAtOnce>() { ConvertGroupsToDigits<kAtOnce>(from, in, walk, x); });
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
