// A radix selection of the k-th largest value, most significant digit first, by one cluster of blocks, then one
// ordered pass that writes the chosen indices. Exact and deterministic: histograms are integers.
//
// Each block counts the first digit of its own scores; the blocks add up their counts through distributed shared
// memory, a share of the bins each. When all scores fit in registers every block then gets all candidates, the scores
// with the chosen first digit, and finds the other digits by itself: a barrier of the cluster costs more than the work
// between two of them. More scores than that stay in memory and are read again for each digit.
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/selection/top_k_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
// Digits of 11, 11 and 10 bits: the first one holds two bits of the mantissa, so that scores of one magnitude fall into
// several bins and their counts do not queue up.
constexpr int kDigits = 2048;
__host__ __device__ constexpr int Shift(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
__device__ __forceinline__ uint32_t DigitMask(int pass) { return (pass == 2 ? 1024u : 2048u) - 1; }

// kBlocks: of the cluster. kSteps: float4s of scores that a thread holds; 0: none, they are read again.
template <int kBlocks, int kSteps>
struct Smem {
  int counts[3][kDigits];  // of this block's scores; of all candidates once every block has them
  int all[kDigits];        // of the scores of all blocks
  uint32_t candidates[kBlocks][std::max(4 * kSteps * kThreads, 1)];
  int num_candidates[kBlocks];  // of each block
  int2 above_equal[kBlocks];    // scores of a block above the k-th largest, and equal to it
  int warp_sums[kWarps];
  int num_mine;
  uint32_t digit;
  int left;
};

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0.
__device__ __forceinline__ uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Of a cluster of kBlocks; a single block needs no sm_90.
template <int kBlocks>
struct Cluster {
  static __device__ __forceinline__ int Rank() {
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
  }
  // What any of its threads wrote to shared memory before, in any of its blocks, is visible after.
  static __device__ __forceinline__ void Sync() {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  // `p` is this block's; the same word of another block.
  static __device__ __forceinline__ int Load(const int* p, int block) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      int x;
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(Address(p, block)) : "memory");
      return x;
    }
#endif
    return *p;
  }
  template <typename T>
  static __device__ __forceinline__ void Store(T* p, int block, T x) {
    static_assert(sizeof(T) == 4);
#if __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(Address(p, block)), "r"(x) : "memory");
      return;
    }
#endif
    *p = x;
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

// The exclusive sum over the block of a count per thread. Whoever calls it again synchronises in between.
__device__ __forceinline__ int ExclusiveSum(int count, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? warp_sums[lane] : 0);
  return before + sum - count;
}

// The digit of the left-th largest of what was counted, and how many of that digit are among them.
template <typename SmemT>
__device__ __forceinline__ void ChooseDigit(const int* counts, SmemT& smem, int left) {
  // Thread t looks at the digits 2047 - 2t and 2046 - 2t, the largest first.
  const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);
  const int2 pair = *reinterpret_cast<const int2*>(&counts[high - 1]);
  const int above = ExclusiveSum(pair.x + pair.y, smem.warp_sums);
  if (above < left && above + pair.x + pair.y >= left) {  // one thread: the k-th is among its digits
    const bool is_high = above + pair.y >= left;
    smem.digit = static_cast<uint32_t>(is_high ? high : high - 1);
    smem.left = left - above - (is_high ? 0 : pair.y);
  }
  __syncthreads();
}

// smem.all = the sum of every block's counts: a block adds up its share of the bins and hands it to all.
template <int kBlocks, int kSteps>
__device__ __forceinline__ void AddUpBlocks(const int* counts, Smem<kBlocks, kSteps>& smem, int rank) {
  constexpr int kShare = kDigits / kBlocks;
  using C = Cluster<kBlocks>;
  C::Sync();
  for (int i = threadIdx.x; i < kShare; i += kThreads) {
    const int bin = rank * kShare + i;
    int part[kBlocks], sum = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) part[b] = C::Load(&counts[bin], b);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) sum += part[b];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) C::Store(&smem.all[bin], b, sum);
  }
  C::Sync();
}

// Warp w of the cluster holds consecutive scores and takes 128 of them at a time, four consecutive ones a lane.
template <int kBlocks, int kSteps>
__global__ void __launch_bounds__(kThreads) TopKKernel(const float* scores, int num_scores, int k, int32_t* out) {
  using C = Cluster<kBlocks>;
  extern __shared__ __align__(16) char raw[];
  auto& smem = *reinterpret_cast<Smem<kBlocks, kSteps>*>(raw);
  LetNextStart();
  const int rank = C::Rank(), lane = threadIdx.x % 32;
  const int warp = rank * kWarps + static_cast<int>(threadIdx.x) / 32;
  constexpr int kStepScores = 4 * kThreads * kBlocks;
  const int steps = kSteps > 0 ? kSteps : (num_scores + kStepScores - 1) / kStepScores;
  const int begin = warp * steps * 128 + 4 * lane;
#pragma unroll
  for (int i = threadIdx.x; i < 3 * kDigits / 4; i += kThreads) reinterpret_cast<int4*>(smem.counts)[i] = int4{};
  if (threadIdx.x == 0) smem.num_mine = 0;
  WaitForPrevious();

  const auto load = [&](int at) {
    float4 x{};
    if (at + 4 <= num_scores && reinterpret_cast<uintptr_t>(scores) % 16 == 0) {
      x = *reinterpret_cast<const float4*>(scores + at);
    } else {
      if (at < num_scores) x.x = scores[at];
      if (at + 1 < num_scores) x.y = scores[at + 1];
      if (at + 2 < num_scores) x.z = scores[at + 2];
      if (at + 3 < num_scores) x.w = scores[at + 3];
    }
    return uint4{OrderedBits(x.x), OrderedBits(x.y), OrderedBits(x.z), OrderedBits(x.w)};
  };
  uint4 held[std::max(kSteps, 1)];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) held[i] = load(begin + i * 128);
  // step(first index, ordered bits): 128 scores of a warp.
  const auto for_each_step = [&](auto step) {
    if constexpr (kSteps > 0) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) step(begin + i * 128, held[i]);
    } else {
      for (int i = 0; i < steps; ++i) step(begin + i * 128, load(begin + i * 128));
    }
  };
  const auto for_each = [&](auto body) {
    for_each_step([&](int at, const uint4& bits) {
      if (at < num_scores) body(bits.x);
      if (at + 1 < num_scores) body(bits.y);
      if (at + 2 < num_scores) body(bits.z);
      if (at + 3 < num_scores) body(bits.w);
    });
  };
  __syncthreads();

  for_each([&](uint32_t bits) { atomicAdd(&smem.counts[0][bits >> Shift(0)], 1); });
  AddUpBlocks(smem.counts[0], smem, rank);
  ChooseDigit(smem.all, smem, k);
  uint32_t prefix = smem.digit << Shift(0);  // the digits of the k-th largest found so far
  uint32_t known = ~0u << Shift(0);          // which bits those are
  int left = smem.left;                      // scores still to be taken among those with this prefix

  if constexpr (kSteps > 0) {
    for_each([&](uint32_t bits) {
      if ((bits & known) != prefix) return;
      const int at = atomicAdd(&smem.num_mine, 1);  // in any order: they are only counted
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) C::Store(&smem.candidates[rank][at], b, bits);
    });
    __syncthreads();
    if (threadIdx.x < kBlocks) C::Store(&smem.num_candidates[rank], threadIdx.x, smem.num_mine);
    C::Sync();
  }
#pragma unroll
  for (int pass = 1; pass < 3; ++pass) {
    const auto count = [&](uint32_t bits) {
      if ((bits & known) == prefix) atomicAdd(&smem.counts[pass][(bits >> Shift(pass)) & DigitMask(pass)], 1);
    };
    if constexpr (kSteps > 0) {
      constexpr int kShare = kThreads / kBlocks;  // of the threads, for each block's candidates
      const int block = static_cast<int>(threadIdx.x) / kShare;
      const int n = smem.num_candidates[block];
      for (int i = threadIdx.x % kShare; i < n; i += kShare) count(smem.candidates[block][i]);
      __syncthreads();
      ChooseDigit(smem.counts[pass], smem, left);
    } else {
      for_each(count);
      AddUpBlocks(smem.counts[pass], smem, rank);
      ChooseDigit(smem.all, smem, left);
    }
    prefix |= smem.digit << Shift(pass);
    known |= DigitMask(pass) << Shift(pass);
    left = smem.left;
  }

  // `prefix` is the k-th largest value; of those equal to it the first `left` are taken. A thread's counts: above it
  // in the low half, equal to it in the high half; then those of all before it in its warp, block, cluster.
  uint64_t mine = 0;
  for_each([&](uint32_t bits) { mine += bits > prefix ? 1u : bits == prefix ? uint64_t{1} << 32 : 0; });
  const auto warp_sum = [&](uint64_t x) {
    return static_cast<uint64_t>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x))) |
           static_cast<uint64_t>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x >> 32))) << 32;
  };
  auto* warp_totals = reinterpret_cast<uint64_t*>(smem.all);  // not read any more
  const uint64_t warp_total = warp_sum(mine);
  if (lane == 0) warp_totals[threadIdx.x / 32] = warp_total;
  __syncthreads();
  uint64_t before = warp_sum(lane < static_cast<int>(threadIdx.x) / 32 ? warp_totals[lane] : 0);
  if (threadIdx.x < 32) {
    const uint64_t block_total = warp_sum(warp_totals[lane]);
    if (lane < kBlocks) {
      C::Store(&smem.above_equal[rank].x, lane, static_cast<int>(block_total));
      C::Store(&smem.above_equal[rank].y, lane, static_cast<int>(block_total >> 32));
    }
  }
  C::Sync();
  for (int b = 0; b < rank; ++b) {
    before += static_cast<uint64_t>(smem.above_equal[b].x) | static_cast<uint64_t>(smem.above_equal[b].y) << 32;
  }
  for_each_step([&](int at, const uint4& bits) {
    const uint32_t value[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t count = 0;  // above, equal << 16
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < num_scores) count += value[i] > prefix ? 1u : value[i] == prefix ? 1u << 16 : 0;
    }
    uint32_t sum = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    const uint32_t step_total = __shfl_sync(0xffffffffu, sum, 31);
    sum -= count;
    int above = static_cast<int>(before) + static_cast<int>(sum & 0xffff);
    int equal = static_cast<int>(before >> 32) + static_cast<int>(sum >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i >= num_scores) continue;
      if (value[i] > prefix) {
        out[above++ + min(equal, left)] = at + i;
      } else if (value[i] == prefix) {
        if (equal < left) out[above + equal] = at + i;
        ++equal;
      }
    }
    before += static_cast<uint64_t>(step_total & 0xffff) | static_cast<uint64_t>(step_total >> 16) << 32;
  });
}

template <int kBlocks, int kSteps>
cudaError_t Launch(const TopKArgs& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Smem<kBlocks, kSteps>);
  const auto kernel = TopKKernel<kBlocks, kSteps>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  return LaunchClustersEarly(kBlocks, kernel, kBlocks, kThreads, kBytes, stream, a.scores,
                             static_cast<int>(a.num_scores), static_cast<int>(a.k), a.out);
}

}  // namespace

cudaError_t TopK(const TopKArgs& a, cudaStream_t stream) {
  if (a.k == 0) return cudaSuccess;
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return e;
  const char* variant = std::getenv("SPLICE_BENCH_TOPK");
  switch (variant == nullptr ? 0 : std::atoi(variant)) {
    case 1:
      return Launch<1, 8>(a, stream);
    case 2:
      return Launch<2, 4>(a, stream);
    case 4:
      return Launch<4, 2>(a, stream);
    case 10:
      return Launch<1, 0>(a, stream);
    case 80:
      return Launch<8, 0>(a, stream);
    default:
      break;
  }
  if (major < 9) return Launch<1, 0>(a, stream);
  return a.num_scores <= 4 * kThreads * 8 ? Launch<8, 1>(a, stream) : Launch<8, 0>(a, stream);
}

}  // namespace spl::kernels::cuda
