// One block: a radix selection of the k-th largest value, most significant digit first, then one ordered pass that
// writes the chosen indices. Exact and deterministic: histograms are integers.
#include "kernels/selection/top_k_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kRegisterScores = 32;  // a thread: up to 32768 scores are read from memory once
// Digits of 11, 11 and 10 bits: the first one holds two bits of the mantissa, so that scores of one magnitude fall into
// several bins and their counts do not queue up.
constexpr int kDigits = 2048;

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0.
__device__ __forceinline__ uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The exclusive sum over the block of a count per thread, and the total.
__device__ __forceinline__ int ExclusiveSum(int count, int* warp_sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = lane < kWarps ? warp_sums[lane] : 0;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  *total = __shfl_sync(0xffffffffu, before, kWarps - 1);
  const int base = warp == 0 ? 0 : __shfl_sync(0xffffffffu, before, warp - 1);
  __syncthreads();  // warp_sums may be used again
  return base + sum - count;
}

// Thread t holds the consecutive scores [t * each, (t + 1) * each), so that an ordered pass needs no sort.
// kInRegisters: each <= kRegisterScores and scores stay in registers over the passes.
template <bool kInRegisters>
__global__ void __launch_bounds__(kThreads) TopKKernel(const float* scores, int num_scores, int k, int32_t* out) {
  __shared__ int histogram[kDigits];
  __shared__ int warp_sums[kWarps];
  __shared__ uint32_t chosen_digit;
  __shared__ int left_after;
  const int each = (num_scores + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, num_scores), end = min(begin + each, num_scores);
  uint32_t held[kInRegisters ? kRegisterScores : 1];
  if constexpr (kInRegisters) {
#pragma unroll
    for (int i = 0; i < kRegisterScores; ++i) held[i] = begin + i < end ? OrderedBits(scores[begin + i]) : 0;
  }
  const auto for_each = [&](auto body) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kRegisterScores; ++i) {
        if (begin + i < end) body(begin + i, held[i]);
      }
    } else {
      for (int i = begin; i < end; ++i) body(i, OrderedBits(scores[i]));
    }
  };

  uint32_t prefix = 0;  // the digits of the threshold found so far
  uint32_t known = 0;   // which bits those are
  int left = k;         // scores still to be taken among those with this prefix
  constexpr int kShifts[] = {21, 10, 0};
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = kShifts[pass];
    const uint32_t digit_mask = (pass == 2 ? 1024u : 2048u) - 1;
    histogram[threadIdx.x] = 0;
    histogram[threadIdx.x + kThreads] = 0;
    __syncthreads();
    for_each([&](int, uint32_t bits) {
      if ((bits & known) == prefix) atomicAdd(&histogram[(bits >> shift) & digit_mask], 1);
    });
    __syncthreads();
    // Thread t looks at the digits 2047 - 2t and 2046 - 2t, the largest first.
    const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x), high_count = histogram[high],
              low_count = histogram[high - 1];
    int total;
    const int above = ExclusiveSum(high_count + low_count, warp_sums, &total);
    if (above < left && above + high_count + low_count >= left) {  // one thread: the k-th is among its digits
      const bool is_high = above + high_count >= left;
      chosen_digit = static_cast<uint32_t>(is_high ? high : high - 1);
      left_after = left - above - (is_high ? 0 : high_count);
    }
    __syncthreads();
    prefix |= chosen_digit << shift;
    known |= digit_mask << shift;
    left = left_after;
  }

  // `prefix` is the k-th largest value; of those equal to it the first `left` are taken.
  int above = 0, equal = 0;
  for_each([&](int, uint32_t bits) {
    above += bits > prefix;
    equal += bits == prefix;
  });
  int total;
  const int equal_before = ExclusiveSum(equal, warp_sums, &total);
  const int equal_taken = max(0, min(equal, left - equal_before));
  int at = ExclusiveSum(above + equal_taken, warp_sums, &total);
  int ties = equal_taken;
  for_each([&](int index, uint32_t bits) {
    if (bits > prefix || (bits == prefix && ties-- > 0)) out[at++] = index;
  });
}

}  // namespace

cudaError_t TopK(const TopKArgs& a, cudaStream_t stream) {
  if (a.k == 0) return cudaSuccess;
  const auto num_scores = static_cast<int>(a.num_scores), k = static_cast<int>(a.k);
  if (num_scores <= kThreads * kRegisterScores) {
    TopKKernel<true><<<1, kThreads, 0, stream>>>(a.scores, num_scores, k, a.out);
  } else {
    TopKKernel<false><<<1, kThreads, 0, stream>>>(a.scores, num_scores, k, a.out);
  }
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
