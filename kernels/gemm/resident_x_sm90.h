// x of a product of few rows in shared memory, converted to f16 (skinny_codes_gemm_cuda_sm90.cu). Included by .cu files
// only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace spl::kernels::cuda {

inline constexpr int kResidentRows = 8, kResidentGroup = 128;

// Columns in the pieces of lane c of a quad, for one product of the tensor cores after the other.
//   kOwn       32 c ..., as they stand
//   kArranged  16 c ... and 16 (c + 4) ..., each as ArrangeFp8Codes: 2 q + 8 and 2 q, then 2 q + 9 and 2 q + 1
enum class ColumnOrder { kOwn, kArranged };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Each group of kResidentGroup columns has `rows` rows of 16 pieces of 16 bytes, four for each lane of a quad, and two
// numbers a row. A group of a row is multiplied by the power of two that takes its largest number to [2^14, 2^15).
struct ResidentX {
  uint32_t pieces;
  float* scales;  // [groups][kResidentRows]: what a sum of products is multiplied by
  float* sums;    // [groups][kResidentRows]: of x as it is stored
  int rows;

  __device__ uint32_t Piece(int group, int row, int i, int c) const {
    return pieces + (group * rows + row) * (kResidentGroup * 2) + (((i * 4 + c) ^ (row & 1) << 2) * 16);
  }
};

// Writes the eight columns 8 (lane % 16) ... of a group, pairs of f16.
template <ColumnOrder kOrder>
__device__ __forceinline__ void StoreColumns(const ResidentX& x, int group, int row, const uint32_t (&pair)[4]) {
  const int lane = threadIdx.x % 16;
  uint4 words{pair[0], pair[1], pair[2], pair[3]};
  uint32_t at = 0;
  if constexpr (kOrder == ColumnOrder::kOwn) {
    at = x.Piece(group, row, lane % 4, lane / 4);
  } else {
    // An even lane has the first eight columns of a block of 16, an odd one the others: they exchange, so that the even
    // one has columns 0 to 3 and 8 to 11, the other 4 to 7 and 12 to 15.
    const bool odd = lane % 2 != 0;
    const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[2], 1);
    const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? pair[1] : pair[3], 1);
    const uint32_t low[2] = {odd ? first : pair[0], odd ? second : pair[1]};
    const uint32_t high[2] = {odd ? pair[2] : first, odd ? pair[3] : second};
    words = {__byte_perm(high[0], low[0], 0x5410), __byte_perm(high[0], low[0], 0x7632),
             __byte_perm(high[1], low[1], 0x5410), __byte_perm(high[1], low[1], 0x7632)};
    const int block = lane / 2;
    at = x.Piece(group, row, block / 4 * 2 + lane % 2, block % 4);
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// The groups of x that half a warp converts, one after the other: of chunks of kGroups groups every kWarps-th one,
// which is what this warp multiplies, and of all rows.
template <int kGroups, int kWarps>
struct GroupWalk {
  const int warp, units, rows;  // units: groups of a row of this warp
  int unit, row = 0;            // half a warp's next one

  __device__ GroupWalk(int chunks, int rows)
      : warp(threadIdx.x / 32),
        units((chunks - warp + kWarps - 1) / kWarps * kGroups),
        rows(rows),
        unit(threadIdx.x % 32 / 16) {}
  // Past the last one the last one is made again: both halves stay together, and write what stands there.
  __device__ void Next(int& group, int& of_row) {
    while (unit >= units) {
      unit -= units;
      ++row;
    }
    of_row = min(row, rows - 1);
    const int turn = row < rows ? unit : units - 1;
    group = (turn / kGroups * kWarps + warp) * kGroups + turn % kGroups;
    unit += 2;
  }
};

// Eight columns of a group, pairs of bf16; columns past the last are zeros.
__device__ __forceinline__ uint4 LoadColumns(const __nv_bfloat16* from, int64_t in, int group, int row) {
  const int column = group * kResidentGroup + threadIdx.x % 16 * 8;
  return column < in ? *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(row) * in + column)
                     : uint4{0, 0, 0, 0};
}

// The bits of the largest magnitude of each of kCount groups, of which this lane has eight columns.
template <int kCount>
__device__ __forceinline__ void LargestOf(const uint4 (&bits)[kCount], uint32_t (&most)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t two = __vmaxu2(__vmaxu2(bits[i].x & 0x7fff7fffu, bits[i].y & 0x7fff7fffu),
                                  __vmaxu2(bits[i].z & 0x7fff7fffu, bits[i].w & 0x7fff7fffu));
    most[i] = max(two & 0xffffu, two >> 16);
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i] = max(most[i], __shfl_xor_sync(0xffffffffu, most[i], step));
  }
}

// Calls convert<n>(), n the groups that half a warp has in flight: no more than it has, or the last one would be made
// several times.
template <typename Walk, typename Convert>
__device__ __forceinline__ void ConvertAtOnce(const Walk& walk, const Convert& convert) {
  const int groups = walk.units * walk.rows;  // that the warp converts
  if (groups == 0) return;
  if (groups <= 2) {
    convert.template operator()<1>();
  } else if (groups <= 4) {
    convert.template operator()<2>();
  } else {
    convert.template operator()<4>();
  }
  __syncwarp();
}

template <ColumnOrder kOrder, bool kSums, int kAtOnce, typename Walk>
__device__ __forceinline__ void ConvertGroups(const __nv_bfloat16* from, int64_t in, Walk walk, const ResidentX& x) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int done = 0; done < walk.units * x.rows; done += 2 * kAtOnce) {
    uint4 bits[kAtOnce];
    int group[kAtOnce], of_row[kAtOnce];
    uint32_t most[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      walk.Next(group[i], of_row[i]);
      bits[i] = LoadColumns(from, in, group[i], of_row[i]);
    }
    LargestOf(bits, most);
    float sum[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // 2^(14 - e) and its inverse; what is smaller than 2^-112 stays small.
      const uint32_t field = min(268u - (most[i] >> 7), 253u);
      const float by = __uint_as_float(field << 23);
      const uint32_t word[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
      uint32_t pair[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low = __uint_as_float(word[k] << 16) * by, high = __uint_as_float(word[k] & 0xffff0000u) * by;
        const __half2 two = __floats2half2_rn(low, high);
        pair[k] = *reinterpret_cast<const uint32_t*>(&two);
        if constexpr (kSums) sum[i] += low + high;
      }
      StoreColumns<kOrder>(x, group[i], of_row[i], pair);
      if (lane % 16 == 0) x.scales[group[i] * kResidentRows + of_row[i]] = __uint_as_float((254u - field) << 23);
    }
    if constexpr (kSums) {
#pragma unroll
      for (int step = 8; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (lane % 16 == 0) x.sums[group[i] * kResidentRows + of_row[i]] = sum[i];
      }
    }
  }
}

// Converts rows of `in` columns; half a warp converts a group of a row (GroupWalk). kSums: makes x.sums.
template <ColumnOrder kOrder, int kGroups, int kWarps, bool kSums>
__device__ __forceinline__ void ConvertRows(const __nv_bfloat16* from, int64_t in, int chunks, const ResidentX& x) {
  const GroupWalk<kGroups, kWarps> walk(chunks, x.rows);
  ConvertAtOnce(walk, [&]<int kAtOnce>() { ConvertGroups<kOrder, kSums, kAtOnce>(from, in, walk, x); });
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
