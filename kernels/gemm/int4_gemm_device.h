// Device code of the products with int4 weights: their parameters, and how codes (ArrangeInt4Codes) become operands of
// an mma.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/int4_gemm_cuda.h"

namespace spl::kernels::cuda {

// True if the arguments meet int4_gemm_cuda.h, as SkinnyInt4Gemm does.
inline bool ServedInt4(const Int4GemmArgs& a) {
  return ServedCodes(a) && IsInt4Served(a.in_features, a.scale_group) && a.column_order == nullptr;
}

// 128 + zero point in bf16, twice: what WidenInt4Pair subtracts.
__host__ __device__ constexpr uint32_t Int4Zero(uint32_t zero_point) { return 0x43004300u + zero_point * 0x00010001u; }

// Columns 2 i and 2 i + 1 of a word of eight codes, less the zero point (`zero`: Int4Zero). A code is the low bits of
// the bf16 number 128 + code, so that the difference is exact.
__device__ __forceinline__ uint32_t WidenInt4Pair(uint32_t word, int i, uint32_t zero) {
  const uint32_t biased = (word >> (4 * i) & 0x000f000fu) | 0x43004300u;
  const __nv_bfloat162 value =
      __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&biased), *reinterpret_cast<const __nv_bfloat162*>(&zero));
  return *reinterpret_cast<const uint32_t*>(&value);
}

// A quarter of a warp reads four 16-byte pieces of two rows of x, whose rows have 256 bytes: the place of a piece, such
// that they lie in different banks.
__device__ __forceinline__ uint32_t Int4RowOffset(int row, int piece) {
  return static_cast<uint32_t>(row * 256 + ((piece ^ (row & 1) << 2) * 16));
}
// The same for a row of 128 codes, 64 bytes, where a warp reads one piece of eight rows.
__device__ __forceinline__ uint32_t Int4CodeOffset(int row, int piece) {
  return static_cast<uint32_t>(row * 64 + ((piece ^ (row >> 1 & 3)) * 16));
}

}  // namespace spl::kernels::cuda
