// Rows of x for a product of few rows, eight columns at a time, as resident_x_sm90.h converts them: as they stand, or
// normalized on the way. Included by .cu files only.
//
// RMSNorm gives the bits of norm_cuda.cu. There a block of at most 16 warps has a row, and warp w has its columns 128 w
// ..., 128 (w + 16) ... and so on, four a lane; the warps' sums of squares are then added by a tree. Here a warp sums
// for one or more of those.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/row_math_cuda.h"
#include "kernels/gemm/resident_x_sm90.h"

namespace spl::kernels::cuda {

inline constexpr int kNormWarps = 16;  // most in norm_cuda.cu for rows of up to kMaxNormedColumns
// The sums of a block's rows, and the scales of the rows for each of its warps.
constexpr int NormScratch(int warps) { return kResidentRows * (kNormWarps + warps); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct PlainRows {
  static constexpr int kAtOnce = 4;  // loads in flight
  const __nv_bfloat16* x;
  int64_t in;
  __device__ __forceinline__ uint4 Load(int row, int column) const {
    return *reinterpret_cast<const uint4*>(x + row * in + column);
  }
};

struct NormedRows {
  static constexpr int kAtOnce = 2;  // each has four times the registers
  const float* x;
  const float* weight;
  const float* scales;  // [rows], in shared memory
  int64_t in;
  __device__ __forceinline__ uint4 Load(int row, int column) const {
    const float* const from = x + row * in + column;
    const float scale = scales[row];
    const float4 first = Normed(Load4(from), scale, Load4(weight + column));
    const float4 second = Normed(Load4(from + 4), scale, Load4(weight + column + 4));
    return {PackBf16(first.x, first.y), PackBf16(first.z, first.w), PackBf16(second.x, second.y),
            PackBf16(second.z, second.w)};
  }
};

// The sums of squares of up to kAtOnce rows from `x`, as far as they are this warp's: partial[row][kNormWarps].
template <int kWarps, int kAtOnce>
__device__ __forceinline__ void SumSquares(const float* x, int num_rows, int width, int norm_warps, float* partial) {
  constexpr int kEach = kNormWarps / kWarps, kAhead = 2;  // warps of norm_cuda.cu for each one here; loads of a row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum[kEach][kAtOnce] = {};
#pragma unroll 1
  for (int begin = 0; begin < width; begin += kAhead * norm_warps * kResidentGroup) {
    float4 value[kEach][kAhead][kAtOnce];
#pragma unroll
    for (int i = 0; i < kEach * kAhead * kAtOnce; ++i) {
      const int row = i % kAtOnce, ahead = i / kAtOnce % kAhead, each = i / kAtOnce / kAhead;
      const int column = begin + (ahead * norm_warps + warp + each * kWarps) * kResidentGroup + 4 * lane;
      // Zeros change no sum.
      const bool valid = row < num_rows && column < width && warp + each * kWarps < norm_warps;
      value[each][ahead][row] = valid ? Load4(x + static_cast<int64_t>(row) * width + column) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kEach * kAhead * kAtOnce; ++i) {
      const int row = i % kAtOnce, ahead = i / kAtOnce % kAhead, each = i / kAtOnce / kAhead;
      sum[each][row] = AddSquares(sum[each][row], value[each][ahead][row]);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kEach * kAtOnce; ++i)
      sum[i / kAtOnce][i % kAtOnce] += __shfl_xor_sync(0xffffffffu, sum[i / kAtOnce][i % kAtOnce], offset);
  }
  if (lane != 0) return;
#pragma unroll
  for (int i = 0; i < kEach * kAtOnce; ++i) {
    const int row = i % kAtOnce, each = i / kAtOnce;
    if (row < num_rows) partial[row * kNormWarps + warp + each * kWarps] = sum[each][row];
  }
}

// The scales of all rows, in shared memory: a copy for each warp. All threads of the block call it. scratch:
// NormScratch(kWarps) floats.
template <int kWarps>
__device__ __forceinline__ const float* NormScales(const float* x, int num_rows, int width, float eps, float* scratch) {
  static_assert(kNormWarps % kWarps == 0 && kResidentRows == 8);
  constexpr int kAtOnce = 4;  // rows
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16;
  const int norm_warps = min((width + kResidentGroup - 1) / kResidentGroup, kNormWarps);
#pragma unroll 1
  for (int row = 0; row < num_rows; row += kAtOnce) {
    SumSquares<kWarps, kAtOnce>(x + static_cast<int64_t>(row) * width, min(num_rows - row, kAtOnce), width, norm_warps,
                                scratch + row * kNormWarps);
  }
  __syncthreads();
  float* const scales = scratch + kResidentRows * kNormWarps + warp * kResidentRows;
  // Half a warp adds the sums of a row: with at most 16 of them the first step of norm_cuda.cu's tree adds zeros.
  float sum[kResidentRows / 2];
#pragma unroll
  for (int i = 0; i < kResidentRows / 2; ++i) {
    const bool valid = 2 * i + half < num_rows && lane % 16 < norm_warps;
    sum[i] = valid ? scratch[(2 * i + half) * kNormWarps + lane % 16] : 0.0f;
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kResidentRows / 2; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
  }
  const int row = lane % 16 * 2 + half;
  const float own = lane % 4 < 2 ? (lane % 2 == 0 ? sum[0] : sum[1]) : (lane % 2 == 0 ? sum[2] : sum[3]);
  if (row < num_rows) scales[row] = NormScale(own, width, eps);
  __syncwarp();
  return scales;
}

// Brings the norm's weight to the L2 cache, while the rows are still being made.
__device__ __forceinline__ void PrefetchNorm(const float* weight, int64_t in, int threads) {
  for (int64_t i = int64_t{32} * threadIdx.x; i < in; i += int64_t{32} * threads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + i));
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
