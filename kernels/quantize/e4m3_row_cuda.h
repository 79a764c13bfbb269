// A row of activations that a block has in its registers becomes codes and a scale (quantize_rows.h). Included by .cu
// files only.
#pragma once

#include <cstdint>

#include "kernels/common/e4m3.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/quantize/quantize_rows_cuda.h"

namespace spl::kernels::cuda {

// Threads of a block for a row, and vectors of four columns that a thread then has at most.
struct RowShape {
  static constexpr int kFewVectors = 2, kMaxVectors = 8;
  int threads, vectors;  // vectors: kFewVectors or kMaxVectors
  explicit RowShape(int64_t width) {
    const int64_t quads = width / 4;
    threads = quads > 512 * kMaxVectors ? 1024 : quads >= 512 ? 512 : static_cast<int>((quads + 31) / 32 * 32);
    vectors = quads <= kFewVectors * threads ? kFewVectors : kMaxVectors;
  }
};
static_assert(kQuantizedRowMax == 4 * RowShape::kMaxVectors * 1024);

// First column of vector v of this thread.
__device__ __forceinline__ int ColumnOf(int v) {
  return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 4;
}

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
__device__ __forceinline__ float BlockMax(float x, float* scratch) {
  x = WarpMax(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return WarpMax(lane < static_cast<int>(blockDim.x + 31) / 32 ? scratch[lane] : 0.0f);
}

__device__ __forceinline__ float MaxOf(float4 x) {
  return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

// The factor of values whose largest magnitude is `max`, and their scale.
__device__ __forceinline__ float E4M3Factor(float max, float& scale) {
  const bool zero = max < 0x1p-100f;
  scale = zero ? 1.0f : __fdiv_rn(max, kE4M3Max);
  return zero ? 0.0f : __fdiv_rn(kE4M3Max, max);
}

// Columns c to c + 3. Four lanes have 16 columns, and write a word each: with its own two codes those of the lane that
// is two away. Called by all four.
__device__ __forceinline__ void StoreE4M3Quad(float4 x, float by, int c, uint8_t* codes) {
  const int lane = threadIdx.x % 4;
  const uint32_t lanes = 0xfu << (threadIdx.x % 32 / 4 * 4);
  const uint32_t low = E4M3Pair(__fmul_rn(x.x, by), __fmul_rn(x.y, by)),
                 high = E4M3Pair(__fmul_rn(x.z, by), __fmul_rn(x.w, by));
  const uint32_t other = __shfl_xor_sync(lanes, lane < 2 ? high : low, 2);
  const uint32_t word = lane < 2 ? ArrangedFp8Word(low, other) : ArrangedFp8Word(other, high);
  *reinterpret_cast<uint32_t*>(codes + c / 16 * 16 + 4 * (lane % 2 * 2 + lane / 2)) = word;
}

// A tensor in e4m3.
struct E4M3Tensor {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t group_stride = 0;  // from one group's scales to the next one's; 0: all columns have one

  explicit E4M3Tensor(const Activations& out, int64_t num_rows)
      : codes(static_cast<uint8_t*>(out.data)),
        scales(out.scales),
        group_stride(out.scale_group == 0 ? 0 : E4M3Rows(num_rows)) {}
};

// Stores a row that the block has in registers: vector v of a thread is columns ColumnOf(v) to + 3, so that a warp has
// the 128 columns of a group. Called by all threads. width: a multiple of 16. scratch: 32 floats of shared memory that
// no thread still reads.
template <int kVectors>
__device__ __forceinline__ void StoreE4M3Row(const float4 (&x)[kVectors], int64_t row, int width, const E4M3Tensor& out,
                                             float* scratch) {
  static_assert(kE4M3Group == 128);
  uint8_t* const codes = out.codes + row * width;
  if (out.group_stride != 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = ColumnOf(v);
      float scale;
      const float by = E4M3Factor(WarpMax(c < width ? MaxOf(x[v]) : 0.0f), scale);
      if (c >= width) continue;
      StoreE4M3Quad(x[v], by, c, codes);
      if (threadIdx.x % 32 == 0) out.scales[c / kE4M3Group * out.group_stride + row] = scale;
    }
    return;
  }
  float max = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (ColumnOf(v) < width) max = fmaxf(max, MaxOf(x[v]));
  }
  float scale;
  const float by = E4M3Factor(BlockMax(max, scratch), scale);
  if (threadIdx.x == 0) out.scales[row] = scale;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (const int c = ColumnOf(v); c < width) StoreE4M3Quad(x[v], by, c, codes);
  }
}

}  // namespace spl::kernels::cuda
