#include <cmath>

#include "kernels/cuda/cuda_types.h"
#include "kernels/sampling/argmax_cuda.h"

namespace spl::kernels::cuda {
namespace {

struct Best {
  float value;
  int32_t index;
};

__device__ __forceinline__ Best Better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

// One block a row. NaN compares false with everything, so it never replaces a candidate.
__global__ void ArgmaxKernel(const float* logits, int32_t* out, float* values, int64_t width) {
  __shared__ Best partial[32];
  const float* row = logits + static_cast<int64_t>(blockIdx.x) * width;
  constexpr int32_t kNone = 0x7fffffff;
  Best best{-INFINITY, kNone};
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(row) % 16 == 0) {  // one block has to keep many loads in flight
    constexpr int kLoads = 4;
    const int64_t step = static_cast<int64_t>(blockDim.x) * 4;
    for (; done + kLoads * step <= width; done += kLoads * step) {
      float4 v[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) v[i] = Load4(row + done + i * step + threadIdx.x * 4);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t j = static_cast<int32_t>(done + i * step) + static_cast<int32_t>(threadIdx.x) * 4;
        best = Better(Better(Better(Better(best, {v[i].x, j}), {v[i].y, j + 1}), {v[i].z, j + 2}), {v[i].w, j + 3});
      }
    }
  }
  for (int64_t j = done + threadIdx.x; j < width; j += blockDim.x)
    best = Better(best, {row[j], static_cast<int32_t>(j)});
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    best = Better(best,
                  {__shfl_xor_sync(0xffffffffu, best.value, offset), __shfl_xor_sync(0xffffffffu, best.index, offset)});
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = partial[threadIdx.x];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      best = Better(
          best, {__shfl_xor_sync(0xffffffffu, best.value, offset), __shfl_xor_sync(0xffffffffu, best.index, offset)});
    }
    if (threadIdx.x == 0) {
      const int32_t index = best.index == kNone ? 0 : best.index;
      out[blockIdx.x] = index;
      if (values != nullptr) values[blockIdx.x] = row[index];
    }
  }
}

}  // namespace

cudaError_t Argmax(const ArgmaxArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  ArgmaxKernel<<<static_cast<unsigned>(a.num_rows), 1024, 0, stream>>>(a.logits, a.out, a.values, a.width);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
