// A radix selection of the k-th largest value, most significant digit first, by one cluster of blocks, then one
// ordered pass that writes the chosen indices. Exact and deterministic: histograms are integers.
//
// Each block counts the first digit of its own scores and adds its counts to all blocks', through distributed shared
// memory. If all scores fit in registers, every block then gets all candidates (the scores with the chosen first digit)
// and finds the other digits, and the places of its own indices, by itself: a barrier of the cluster costs more than
// the work between two of them. Otherwise scores stay in memory and are read again for each digit. A digit is skipped
// once all scores that share the digits before it are taken.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_launch.h"
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
  int counts[3][kDigits];  // counts of this block's scores; then of all candidates, once every block has them
  int all[kSteps > 0 ? 1 : 3][kDigits];  // counts over the scores of all blocks
  uint32_t candidates[kBlocks][std::max(4 * kSteps * kThreads, 1)];
  // Per block: its candidates, and << 16 its scores of a larger first digit. Zero at the start, like the next two.
  uint32_t block_counts[kBlocks];
  uint32_t num_mine;               // candidates of this block that have their place, and << 16 as above
  uint32_t before;                 // candidates of earlier blocks: above the k-th largest, and << 16 equal to it
  uint64_t block_totals[kBlocks];  // per block: scores above the k-th largest, and << 32 those equal to it
  uint64_t warp_totals[kWarps];    // the same per warp of this block
  int warp_sums[kWarps];
  uint32_t digit;
  int left, num_digit;
};

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0.
__device__ __forceinline__ uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The digit of the left-th largest counted score, how many scores with that digit are among them, and how many have it.
template <typename SmemT>
__device__ __forceinline__ void ChooseDigit(const int* counts, SmemT& smem, int left) {
  // Thread t looks at the digits 2047 - 2t and 2046 - 2t, the largest first.
  const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);
  const int2 pair = *reinterpret_cast<const int2*>(&counts[high - 1]);
  const int above = ExclusiveSum<kThreads>(pair.x + pair.y, smem.warp_sums);
  if (above < left && above + pair.x + pair.y >= left) {  // one thread: the k-th is among its digits
    const bool is_high = above + pair.y >= left;
    smem.digit = static_cast<uint32_t>(is_high ? high : high - 1);
    smem.left = left - above - (is_high ? 0 : pair.y);
    smem.num_digit = is_high ? pair.y : pair.x;
  }
  __syncthreads();
}

// The sum of every block's counts of a digit, once all threads have counted: each block adds its own to all blocks',
// the empty bins left out, which most are.
template <int kBlocks, int kSteps>
__device__ __forceinline__ const int* AddUpBlocks(Smem<kBlocks, kSteps>& smem, int pass) {
  using C = Cluster<kBlocks>;
  __syncthreads();
  if constexpr (kBlocks == 1) {
    return smem.counts[pass];
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < kDigits; i += kThreads) {
      const auto count = static_cast<uint32_t>(smem.counts[pass][i]);
      if (count == 0) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) C::Add(reinterpret_cast<uint32_t*>(&smem.all[pass][i]), b, count);
    }
    C::Sync();
    return smem.all[pass];
  }
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
  constexpr int kCountQuads = (sizeof(smem.counts) + sizeof(smem.all)) / sizeof(int4);
#pragma unroll
  for (int i = threadIdx.x; i < kCountQuads; i += kThreads) reinterpret_cast<int4*>(smem.counts)[i] = int4{};
  if (threadIdx.x < kBlocks) smem.block_counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) smem.num_mine = smem.before = 0;
  C::Arrive();  // waited for before the first write to another block
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
  C::Wait();
  ChooseDigit(AddUpBlocks(smem, 0), smem, k);
  uint32_t prefix = smem.digit << Shift(0);  // the digits of the k-th largest found so far
  uint32_t known = ~0u << Shift(0);          // which bits those are
  int left = smem.left;                      // scores still to be taken among those with this prefix
  int num_prefix = smem.num_digit;           // how many have it

  if constexpr (kSteps > 0) {
    uint32_t count = 0;  // as block_counts
    for_each([&](uint32_t bits) { count += (bits & known) > prefix ? 1u << 16 : (bits & known) == prefix ? 1u : 0; });
    const uint32_t sum = InclusiveSum(count);
    const uint32_t total = __shfl_sync(0xffffffffu, sum, 31);
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(&smem.num_mine, total);  // warps in any order: candidates are only counted
    if (lane < kBlocks) C::Add(&smem.block_counts[rank], lane, total);
    uint32_t at = (__shfl_sync(0xffffffffu, base, 0) + sum - count) & 0xffff;
    for_each([&](uint32_t bits) {
      if ((bits & known) != prefix) return;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) C::Store(&smem.candidates[rank][at], b, bits);
      ++at;
    });
    C::Sync();
  }
  // A share of the threads for each block's candidates: body(block, bits).
  const auto for_each_candidate = [&](auto body) {
    constexpr int kShare = kThreads / kBlocks;
    const int block = static_cast<int>(threadIdx.x) / kShare;
    const int n = static_cast<int>(smem.block_counts[block] & 0xffff);
    for (int i = threadIdx.x % kShare; i < n; i += kShare) body(block, smem.candidates[block][i]);
  };
#pragma unroll 1
  for (int pass = 1; pass < 3 && left < num_prefix; ++pass) {  // unless all of them are taken
    const auto count = [&](uint32_t bits) {
      if ((bits & known) == prefix) atomicAdd(&smem.counts[pass][(bits >> Shift(pass)) & DigitMask(pass)], 1);
    };
    if constexpr (kSteps > 0) {
      for_each_candidate([&](int, uint32_t bits) { count(bits); });
      __syncthreads();
      ChooseDigit(smem.counts[pass], smem, left);
    } else {
      for_each(count);
      ChooseDigit(AddUpBlocks(smem, pass), smem, left);
    }
    prefix |= smem.digit << Shift(pass);
    known |= DigitMask(pass) << Shift(pass);
    left = smem.left;
    num_prefix = smem.num_digit;
  }

  // Taken are the scores above `prefix` in the known bits, and of those equal to it the first `left`. A thread's
  // counts: above it in the low half, equal to it in the high half; then those of all before it in its warp, block,
  // cluster.
  const auto is_above = [&](uint32_t bits) { return (bits & known) > prefix; };
  const auto is_equal = [&](uint32_t bits) { return (bits & known) == prefix; };
  uint64_t mine = 0;
  for_each([&](uint32_t bits) { mine += is_above(bits) ? 1u : is_equal(bits) ? uint64_t{1} << 32 : 0; });
  const auto warp_sum = [&](uint64_t x) {
    return static_cast<uint64_t>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x))) |
           static_cast<uint64_t>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(x >> 32))) << 32;
  };
  const uint64_t warp_total = warp_sum(mine);
  if (lane == 0) smem.warp_totals[threadIdx.x / 32] = warp_total;
  uint64_t before = 0;
  if constexpr (kSteps > 0) {  // every block can tell how many scores the earlier blocks hold
    uint32_t count = 0;
    for_each_candidate([&](int block, uint32_t bits) {
      if (block < rank) count += is_above(bits) ? 1u : is_equal(bits) ? 1u << 16 : 0;
    });
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane == 0 && count != 0) atomicAdd(&smem.before, count);
    __syncthreads();
    before = static_cast<uint64_t>(smem.before & 0xffff) | static_cast<uint64_t>(smem.before >> 16) << 32;
    for (int b = 0; b < rank; ++b) before += smem.block_counts[b] >> 16;
  } else {
    __syncthreads();
    if (threadIdx.x < 32) {
      const uint64_t block_total = warp_sum(smem.warp_totals[lane]);
      if (lane < kBlocks) C::Store(&smem.block_totals[rank], lane, block_total);
    }
    C::Sync();
    for (int b = 0; b < rank; ++b) before += smem.block_totals[b];
  }
  before += warp_sum(lane < static_cast<int>(threadIdx.x) / 32 ? smem.warp_totals[lane] : 0);
  for_each_step([&](int at, const uint4& bits) {
    const uint32_t value[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t count = 0;  // above, equal << 16
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < num_scores) count += is_above(value[i]) ? 1u : is_equal(value[i]) ? 1u << 16 : 0;
    }
    uint32_t sum = InclusiveSum(count);
    const uint32_t step_total = __shfl_sync(0xffffffffu, sum, 31);
    sum -= count;
    int above = static_cast<int>(before) + static_cast<int>(sum & 0xffff);
    int equal = static_cast<int>(before >> 32) + static_cast<int>(sum >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i >= num_scores) continue;
      if (is_above(value[i])) {
        out[above++ + min(equal, left)] = at + i;
      } else if (is_equal(value[i])) {
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
  if (major < 9) return Launch<1, 0>(a, stream);
  return a.num_scores <= 4 * kThreads * 8 ? Launch<8, 1>(a, stream) : Launch<8, 0>(a, stream);
}

}  // namespace spl::kernels::cuda
