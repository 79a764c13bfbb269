// How the sums of a tile (fp8_tile_sm90.h) become y. Included by .cu files only.
#pragma once

#include <algorithm>

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/fp8_tile_sm90.h"

namespace spl::kernels::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scales of this thread's two features.
struct Scales {
  float of[2];
  __device__ __forceinline__ Scales(const Fp8GemmParams& p, int64_t feature, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = feature + 8 * half;
      of[half] = at < p.out ? __ldg(p.scales + at * p.num_groups + group) : 0.0f;
    }
  }
};

// Two floats of another block's shared memory that stand where `p` stands in this one's.
__device__ __forceinline__ float2 LoadOf(const float* p, int block) {
  float2 x;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [remote];\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(SmemAddress(p)), "r"(block)
      : "memory");
  return x;
}

// Two neighbouring features of a row; `word`: the same in bf16.
__device__ __forceinline__ void StorePair(const Fp8GemmParams& p, int row, int64_t feature, uint32_t word) {
  if (row >= p.num_rows || feature >= p.out) return;
  auto* const to = static_cast<__nv_bfloat16*>(p.y) + row * p.y_stride + feature;
  if (p.out % 2 == 0 && p.y_stride % 2 == 0) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  const auto pair = *reinterpret_cast<const __nv_bfloat162*>(&word);
  to[0] = pair.x;
  if (feature + 1 < p.out) to[1] = pair.y;
}

// y of a warpgroup, straight from its registers. `feature`: this thread's first.
template <int kRows, bool kGroups>
__device__ void Store(const Fp8GemmParams& p, int row0, int64_t feature, Sums<kRows>& sums) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  if constexpr (!kGroups) {
    const Scales scale(p, feature, 0);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] *= scale.of[i % 4 / 2];
  }
  if (p.bias != nullptr) {
    const float bias[2] = {feature < p.out ? p.bias[feature] : 0, feature + 8 < p.out ? p.bias[feature + 8] : 0};
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] += bias[i % 4 / 2];
  }
  if (p.y_is_f32) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const int row = row0 + i / 4 * 8 + 2 * c + i % 2;
      const int64_t at = feature + i % 4 / 2 * 8;
      if (row < p.num_rows && at < p.out) static_cast<float*>(p.y)[row * p.y_stride + at] = sums[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {  // 8 features x 8 rows are turned: a lane stores two features of a row
    const uint32_t word = TransposeMatrix(PackBf16(sums[2 * i], sums[2 * i + 1]));
    StorePair(p, row0 + i / 2 * 8 + g, feature - g + i % 2 * 8 + 2 * c, word);
  }
}

// Scales, if scales are of channels, and stores two neighbouring features of a row.
template <bool kGroups>
__device__ __forceinline__ void StoreSum(const Fp8GemmParams& p, int row, int64_t feature, float2 sum) {
  if (row >= p.num_rows || feature >= p.out) return;
  const int64_t next = min(feature + 1, p.out - 1);
  if constexpr (!kGroups) {
    sum.x *= p.scales[feature];
    sum.y *= p.scales[next];
  }
  if (p.bias != nullptr) {
    sum.x += p.bias[feature];
    sum.y += p.bias[next];
  }
  if (!p.y_is_f32) return StorePair(p, row, feature, PackBf16(sum.x, sum.y));
  float* const to = static_cast<float*>(p.y) + row * p.y_stride + feature;
  to[0] = sum.x;
  if (next > feature) to[1] = sum.y;
}

// Adds the sums of the cluster's blocks, in their order, and stores y; each block those of its share of the rows.
template <int kRows, bool kGroups, int kClusterBlocks>
__device__ void AddAndStore(const Fp8GemmParams& p, const Part& part, const float* sums) {
  constexpr int kShare = kRows / kClusterBlocks * (kFeatures / 2);
  constexpr int kAtOnce = std::max(1, std::min(8 / kClusterBlocks, kShare / kConsumerThreads));  // loads in flight
  const int thread = static_cast<int>(threadIdx.x) - 128;
#pragma unroll 1
  for (int first = thread; first < kShare; first += kAtOnce * kConsumerThreads) {
    float2 of[kAtOnce][kClusterBlocks];
    const auto row_of = [&](int i) {
      return Cluster<kSharing>::Rank() * (kRows / kClusterBlocks) + (first + i * kConsumerThreads) / (kFeatures / 2);
    };
    const int column = first % (kFeatures / 2) * 2;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int block = 0; block < kClusterBlocks; ++block)
        of[i][block] = LoadOf(sums + row_of(i) * kPitch + column, block);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float2 sum = of[i][0];
#pragma unroll
      for (int block = 1; block < kClusterBlocks; ++block) {
        sum.x += of[i][block].x;
        sum.y += of[i][block].y;
      }
      StoreSum<kGroups>(p, part.row0 + row_of(i), part.feature0 + column, sum);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
