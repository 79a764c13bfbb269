// A tile is 128 features x kRows rows of y. The weight is the left operand, x the right one: the number of rows is then
// the width of an instruction. The kSplits blocks of a cluster have a part of the columns each, so that there are
// blocks enough to keep the memory busy; they add their sums up through each other's shared memory.
//
// A loader thread keeps a ring of steps full, 64 columns each; two warpgroups of 64 features each empty it.
#include <algorithm>

#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/gemm/split_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kColumns = 64, kGroups = 2;

// 68 to 132 blocks: 24 to 33 tiles of three blocks, 34 to 66 of two. Other shapes were not measured.
constexpr int kFewestTiles = 24, kMostTilesOfThree = 33, kMostTiles = 66;
constexpr int64_t kFewestColumns = 2048;

template <int kSplitCount, int kRowCount>
struct Tiling {
  static constexpr int kSplits = kSplitCount, kRows = kRowCount;
  static constexpr int kFeatures = 64 * kGroups, kConsumers = 128 * kGroups, kThreads = 128 + kConsumers;
  // Eights of rows that a block adds up: every kSplits-th.
  static constexpr int kEights = kRows / 8, kShare = (kEights + kSplits - 1) / kSplits;
  // Shared memory, by addresses from a base that is a multiple of 1024: the ring, and the sums of the other blocks.
  static constexpr int kWBytes = kFeatures * kColumns * 2, kXBytes = kRows * kColumns * 2;
  static constexpr int kBytes = kWBytes + kXBytes;  // of a stage
  static constexpr int kSumBytes = (kSplits - 1) * kShare * kConsumers * 16;
  static constexpr int kCount = std::min(8, (225 * 1024 - kSumBytes) / kBytes);  // stages
  static constexpr int kSmem = kCount * (kBytes + 16) + kSumBytes + 1024;
  static_assert(kWBytes % 1024 == 0 && kXBytes % 1024 == 0 && kCount >= 3 && kSmem <= 227 * 1024);
};

template <typename T>
struct Memory {
  uint32_t base;
  __device__ uint32_t W(int i) const { return base + i * T::kWBytes; }  // rows of 128 bytes, swizzled
  __device__ uint32_t X(int i) const { return base + T::kCount * T::kWBytes + i * T::kXBytes; }
  // The `i`-th eight of this block's share, as the block with place `from` among the others has summed it.
  __device__ uint32_t Sums(int from, int i) const {
    return base + T::kCount * T::kBytes + ((from * T::kShare + i) * T::kConsumers + threadIdx.x - 128) * 16;
  }
  __device__ uint32_t Full(int i) const { return base + T::kCount * T::kBytes + T::kSumBytes + 8 * i; }
  __device__ uint32_t Empty(int i) const { return Full(T::kCount + i); }
};

struct Shape {
  int num_rows, features, steps;
  float* y;
  const float* bias;
  bool add;
};

// Maps of a tile's weight, and of its x.
struct Maps {
  CUtensorMap w, x;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warpgroup's sums of 64 features. Lane 4 g + c of warp w has features 16 w + g and 16 w + g + 8, and of each eight
// rows 2 c and 2 c + 1; element 4 j + i is of feature i / 2 and of row 8 j + 2 c + i % 2.
template <typename T>
using TileSums = float[T::kRows / 2];

template <typename T>
__device__ void Load(Memory<T> memory, const Maps& maps, int begin, int end) {
  const int feature0 = static_cast<int>(blockIdx.x) / T::kSplits * T::kFeatures;
  const int row0 = static_cast<int>(blockIdx.y) * T::kRows;
  const auto load_w = [&](int step, int stage) {
    MbarrierArriveExpect(memory.Full(stage), T::kBytes);
    TmaLoad2(memory.W(stage), &maps.w, memory.Full(stage), step * kColumns, feature0);
  };
  const auto load_x = [&](int step, int stage) {
    TmaLoad2(memory.X(stage), &maps.x, memory.Full(stage), step * kColumns, row0);
  };
  const int early = min(end - begin, T::kCount);
  for (int i = 0; i < early; ++i) load_w(begin + i, i);  // while the kernel in front may still make x
  WaitForPrevious();
  Ring<T::kCount> ring;
  for (int i = 0; i < early; ++i, ring.Advance()) load_x(begin + i, i);
#pragma unroll 1
  for (int step = begin + early; step < end; ++step, ring.Advance()) {
    MbarrierWait(memory.Empty(ring.stage), ring.phase ^ 1);
    load_w(step, ring.stage);
    load_x(step, ring.stage);
  }
}

template <typename T>
__device__ __forceinline__ void Multiply(Memory<T> memory, int steps, TileSums<T>& sums) {
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  const uint64_t w = WgmmaDescriptor(memory.W(0) + group * (64 * kColumns * 2), 16, 1024);
  const uint64_t x = WgmmaDescriptor(memory.X(0), 16, 1024);
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) MbarrierArrive(memory.Empty(stage));
  };
  Ring<T::kCount> ring;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.Advance()) {
    MbarrierWait(memory.Full(ring.stage), ring.phase);
    const uint64_t w_stage = w + ring.stage * (T::kWBytes / 16), x_stage = x + ring.stage * (T::kXBytes / 16);
    WgmmaPin(sums);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) WgmmaSsK(sums, w_stage + 2 * k, x_stage + 2 * k, step > 0 || k > 0);
    WgmmaCommit();
    WgmmaPin(sums);
    WgmmaWait<1>();
    if (step > 0) release(ring.Before());
  }
  WgmmaWait<0>();
  WgmmaPin(sums);
}

__device__ __forceinline__ void StoreRemote16(uint32_t address, int block, float4 v) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(address),
      "r"(block), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

template <typename T>
__device__ __forceinline__ float4 Eight(const TileSums<T>& sums, int j) {
  return {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
}

// Gives each other block its share of these sums.
template <typename T>
__device__ __forceinline__ void Send(Memory<T> memory, const TileSums<T>& sums) {
  const int rank = Cluster<T::kSplits>::Rank();
#pragma unroll
  for (int j = 0; j < T::kEights; ++j) {
    constexpr int kSplits = T::kSplits;
    const int to = j % kSplits;
    if (to != rank) StoreRemote16(memory.Sums(rank < to ? rank : rank - 1, j / kSplits), to, Eight<T>(sums, j));
  }
}

// Adds up the share of this block and stores it.
template <typename T>
__device__ __forceinline__ void Finish(Memory<T> memory, const TileSums<T>& sums, const Shape& s) {
  const int rank = Cluster<T::kSplits>::Rank(), thread = static_cast<int>(threadIdx.x) - 128, lane = thread % 32;
  const int feature = static_cast<int>(blockIdx.x) / T::kSplits * T::kFeatures + thread / 32 * 16 + lane / 4;
  const int row0 = static_cast<int>(blockIdx.y) * T::kRows + lane % 4 * 2;
  float bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int f = feature + 8 * i;
    bias[i] = s.bias != nullptr && f < s.features ? __ldg(s.bias + f) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < T::kEights; ++j) {
    if (j % T::kSplits != rank) continue;
    float v[4] = {};
#pragma unroll
    for (int from = 0; from < T::kSplits; ++from) {
      float4 part = Eight<T>(sums, j);
      if (from != rank) {
        const uint4 bits = LoadShared16(memory.Sums(from < rank ? from : from - 1, j / T::kSplits));
        part = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
      }
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + 8 * j + i % 2, f = feature + i / 2 * 8;
      if (row >= s.num_rows || f >= s.features) continue;
      float* const to = s.y + static_cast<int64_t>(row) * s.features + f;
      const float value = v[i] + bias[i / 2];
      if (s.add) {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
      } else {
        *to = value;
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    SplitGemmKernel(const __grid_constant__ Shape s, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  LetNextStart();
  Memory<T> memory{(SmemAddress(raw) + 1023) / 1024 * 1024};
  asm volatile("" : "+r"(memory.base));  // not to be worked out again in every step
  const int rank = Cluster<T::kSplits>::Rank();
  const int begin = s.steps * rank / T::kSplits, end = s.steps * (rank + 1) / T::kSplits;
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kCount; ++i) {
      MbarrierInit(memory.Full(i), 1);
      MbarrierInit(memory.Empty(i), kGroups);
    }
    MbarrierInitFence();
    PrefetchTensorMap(&maps.w);
    PrefetchTensorMap(&maps.x);
  }
  __syncthreads();
  Cluster<T::kSplits>::Arrive();  // the other blocks write into this one's memory, once it runs
  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) Load<T>(memory, maps, begin, end);
    __syncwarp();
    Cluster<T::kSplits>::Wait();
    Cluster<T::kSplits>::Sync();
  } else {
    TileSums<T> sums;
    if (begin == end) {
#pragma unroll
      for (int i = 0; i < T::kRows / 2; ++i) sums[i] = 0;
    } else {
      Multiply<T>(memory, end - begin, sums);
    }
    Cluster<T::kSplits>::Wait();
    Send<T>(memory, sums);
    Cluster<T::kSplits>::Sync();
    WaitForPrevious();  // y may still be read
    Finish<T>(memory, sums, s);
  }
#endif
}

int CeilDiv(int64_t n, int64_t d) { return static_cast<int>((n + d - 1) / d); }

template <typename T>
cudaError_t Launch(const SplitGemmArgs& a, cudaStream_t stream) {
  const auto in = static_cast<uint64_t>(a.in_features);
  const auto encode = [&](CUtensorMap* map, const void* base, int64_t rows, uint32_t box_rows) {
    return EncodeMatrix(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, static_cast<uint64_t>(rows), in, 2 * in, box_rows,
                        kColumns, CU_TENSOR_MAP_SWIZZLE_128B);
  };
  Maps maps;
  if (!encode(&maps.w, a.weight, a.out_features, T::kFeatures) || !encode(&maps.x, a.x, a.num_rows, T::kRows))
    return cudaErrorNotSupported;
  const Shape shape{.num_rows = static_cast<int>(a.num_rows),
                    .features = static_cast<int>(a.out_features),
                    .steps = CeilDiv(a.in_features, kColumns),
                    .y = a.y,
                    .bias = a.bias,
                    .add = a.add};
  const auto kernel = SplitGemmKernel<T>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSmem);
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(T::kSplits * CeilDiv(a.out_features, T::kFeatures)),
                  static_cast<unsigned>(CeilDiv(a.num_rows, T::kRows)));
  return LaunchClustersEarly(T::kSplits, kernel, grid, dim3(T::kThreads), T::kSmem, stream, shape, maps);
}

template <int kSplits>
cudaError_t LaunchRows(const SplitGemmArgs& a, cudaStream_t stream) {
  if (a.num_rows <= 64) return Launch<Tiling<kSplits, 64>>(a, stream);
  if (a.num_rows <= 96) return Launch<Tiling<kSplits, 96>>(a, stream);
  return Launch<Tiling<kSplits, 128>>(a, stream);
}

bool Served(const SplitGemmArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const auto served = [](int64_t n) { return n > 0 && n < kSplitGemmSizes; };
  return served(a.num_rows) && served(a.out_features) && served(a.in_features) && a.in_features % 8 == 0 &&
         aligned(a.x) && aligned(a.weight) && aligned(a.y);
}

}  // namespace

bool PrefersSplitGemm(int64_t num_rows, int64_t out_features, int64_t in_features) {
  const int tiles = CeilDiv(out_features, 64 * kGroups);
  const int64_t most_rows = tiles < kFewestTiles ? 0 : tiles <= kMostTilesOfThree ? 128 : tiles <= kMostTiles ? 96 : 0;
  return in_features >= kFewestColumns && num_rows > kMaxSkinnyRows && num_rows <= most_rows;
}

cudaError_t SplitGemm(const SplitGemmArgs& a, cudaStream_t stream) {
  return SplitGemm(a, CeilDiv(a.out_features, 64 * kGroups) <= kMostTilesOfThree ? 3 : 2, stream);
}

cudaError_t SplitGemm(const SplitGemmArgs& a, int splits, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  int capability = 0, num_sms = 0;
  const cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e != cudaSuccess) return e;
  if (capability != 90 || !Served(a)) return cudaErrorNotSupported;
  if (splits == 2) return LaunchRows<2>(a, stream);
  return splits == 3 ? LaunchRows<3>(a, stream) : cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
