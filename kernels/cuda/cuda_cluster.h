// A cluster of thread blocks (sm_90): rank, barrier, and loads, stores and additions in each other's shared memory. A
// cluster of one block uses ordinary block operations only, and needs no sm_90. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {

template <int kBlocks>
struct Cluster {
  static __device__ __forceinline__ int Rank() {
    int rank = 0;
    // rank is no constant here: with one, nvcc 13.0 needs many minutes for TokenChoice with a single block.
    if constexpr (kBlocks == 1) asm volatile("mov.u32 %0, 0;" : "=r"(rank));
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
  }
  // Writes to shared memory by any thread of any block before Arrive are visible after Wait.
  static __device__ __forceinline__ void Arrive() {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }
  // Arrives without that promise, and without the fence that keeps it: for blocks that wait for each other's start.
  static __device__ __forceinline__ void ArriveOnly() {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  static __device__ __forceinline__ void Wait() {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  static __device__ __forceinline__ void Sync() {
    Arrive();
    Wait();
  }
  // Adds x to the word of block `block` that corresponds to this block's `p`.
  static __device__ __forceinline__ void Add(uint32_t* p, int block, uint32_t x) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(Address(p, block)), "r"(x) : "memory");
      return;
    }
#endif
    atomicAdd(p, x);
  }
  static __device__ __forceinline__ void Add(uint64_t* p, int block, uint64_t x) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      asm volatile("red.relaxed.cluster.shared::cluster.add.u64 [%0], %1;" ::"r"(Address(p, block)), "l"(x) : "memory");
      return;
    }
#endif
    atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
  }
  template <typename T>
  static __device__ __forceinline__ void Store(T* p, int block, T x) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1 && sizeof(T) == 4) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(Address(p, block)), "r"(x) : "memory");
      return;
    }
    if constexpr (kBlocks > 1 && sizeof(T) == 8) {
      asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(Address(p, block)), "l"(x) : "memory");
      return;
    }
#endif
    *p = x;
  }
  template <typename T>
  static __device__ __forceinline__ T Load(const T* p, int block) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      T x;
      if constexpr (sizeof(T) == 4) {
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(Address(p, block)) : "memory");
      } else {
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(Address(p, block)) : "memory");
      }
      return x;
    }
#endif
    return *p;
  }

 private:
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ uint32_t Address(const void* p, int block) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SmemAddress(p)), "r"(block));
    return address;
  }
#endif
};

#if __CUDA_ARCH__ >= 900
// Publishes to the cluster what its threads wrote to shared memory before.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same without that promise, and without its fence.
__device__ __forceinline__ void ClusterMeet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
#endif

// Sum over the lanes of a warp up to and including this one.
template <typename T>
__device__ __forceinline__ T InclusiveSum(T x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// Exclusive sum over the kThreads threads of a block, one count per thread; total: the sum over all. Synchronise the
// block between two calls. warp_sums [32].
template <int kThreads>
__device__ __forceinline__ int ExclusiveSum(int count, int* warp_sums, int* total = nullptr) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = InclusiveSum(count);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const int of_warp = lane < kThreads / 32 ? warp_sums[lane] : 0;
  if (total != nullptr) *total = __reduce_add_sync(0xffffffffu, of_warp);
  return __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0) + sum - count;
}

}  // namespace spl::kernels::cuda
