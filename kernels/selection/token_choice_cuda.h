// The choice of the k items of the largest keys by a cluster of blocks, each of which holds consecutive items, written
// in ascending order: what SelectTokens and TopTokens share on a device. Included by .cu files only.
//
// As top_k_cuda.cu: a radix selection, most significant digit first, exact and the same bits every time. Each block
// counts the first digit of its own keys and adds its counts to all blocks'; then every block gets the candidates, the
// keys with the chosen first digit, of all blocks, and goes on by itself, for a barrier of the cluster costs more than
// the work between two of them. When there are too many candidates the further digits are counted as the first one was.
#pragma once

#include "kernels/cuda/cuda_cluster.h"

namespace spl::kernels::cuda {

inline constexpr int kChoiceDigits = 2048;  // of 11, 11 and 10 bits
__host__ __device__ constexpr int ChoiceShift(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
inline constexpr uint32_t kForcedKey = ~0u;  // above every other key

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0; below kForcedKey.
__device__ __forceinline__ uint32_t OrderedKey(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// Of a weight, which is not negative; NaN is 0. The sign bit, always 0, makes room for one more bit in the first digit.
__device__ __forceinline__ uint32_t WeightKey(float weight) { return weight > 0 ? __float_as_uint(weight) << 1 : 0; }

template <int kBlocks, int kThreads>
struct TokenChoice {
  using C = Cluster<kBlocks>;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCandidates = 4096 / kBlocks;  // of each block that all blocks are given
  static constexpr int kBins = kChoiceDigits / kThreads;
  static_assert(kBins >= 1 && kBins % 2 == 0 && kThreads % kBlocks == 0);

  struct Smem {
    int counts[kChoiceDigits];  // of this block's keys; of candidates: of all blocks'
    int all[kChoiceDigits];     // of the keys of all blocks
    uint32_t candidates[kBlocks][kCandidates];
    uint32_t num_candidates[kBlocks];  // of each block; more than kCandidates: not all are here
    uint32_t num_above[kBlocks];       // of each block: keys of a larger first digit
    uint32_t num_mine;
    uint32_t before_above, before_equal;
    int warp_sums[32];
    uint32_t digit;
    int left, num_digit;
  };

  // To be called by all threads once before Choose, with a barrier of the cluster in between (every block's words are
  // zero before another block adds to them).
  static __device__ __forceinline__ void Clear(Smem& s) {
    for (int i = threadIdx.x; i < kChoiceDigits; i += kThreads) s.counts[i] = s.all[i] = 0;
    if (threadIdx.x < kBlocks) s.num_candidates[threadIdx.x] = s.num_above[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_mine = s.before_above = s.before_equal = 0;
  }

  // key(i) of this block's items [0, num_items), at least one in the cluster; emit(i, place) for those chosen, place in
  // [0, k). k is at least 1 and at most the items of the cluster. All threads, after a barrier behind what key() reads.
  template <typename Key, typename Emit>
  static __device__ __forceinline__ void Choose(Smem& s, int rank, int num_items, int k, const Key& key,
                                                const Emit& emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < num_items; i += kThreads) atomicAdd(&s.counts[key(i) >> ChoiceShift(0)], 1);
    AddUpBlocks(s);
    FindDigit(kBlocks == 1 ? s.counts : s.all, s, k);
    uint32_t prefix = s.digit << ChoiceShift(0), known = ~0u << ChoiceShift(0);
    int left = s.left, num_prefix = s.num_digit;
    __syncthreads();
    if (left < num_prefix) {
      for (int i = threadIdx.x; i < kChoiceDigits; i += kThreads) s.counts[i] = 0;
    }

    // Candidates in any order: they are only counted.
    uint32_t num_above = 0, num_equal = 0;
    for (int i = threadIdx.x; i < num_items; i += kThreads) {
      const uint32_t x = key(i) & known;
      num_above += x > prefix;
      num_equal += x == prefix;
    }
    const uint32_t warp_above = __reduce_add_sync(0xffffffffu, num_above);
    const uint32_t warp_equal = __reduce_add_sync(0xffffffffu, num_equal);
    if (lane < kBlocks) {
      if (warp_above != 0) C::Add(&s.num_above[rank], lane, warp_above);
      if (warp_equal != 0) C::Add(&s.num_candidates[rank], lane, warp_equal);
    }
    if (left < num_prefix && num_equal != 0) {
      uint32_t at = atomicAdd(&s.num_mine, num_equal);
      for (int i = threadIdx.x; i < num_items; i += kThreads) {
        const uint32_t x = key(i);
        if ((x & known) != prefix) continue;
        if (at < kCandidates) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) C::Store(&s.candidates[rank][at], b, x);
        }
        ++at;
      }
    }
    C::Sync();
    bool complete = true;  // every block knows all that is left to know
    for (int b = 0; b < kBlocks; ++b) complete &= s.num_candidates[b] <= kCandidates;
    complete |= left == num_prefix;
    constexpr int kShare = kThreads / kBlocks;
    const int my_block = threadIdx.x / kShare, my_first = threadIdx.x % kShare;
    const int my_candidates = static_cast<int>(min(s.num_candidates[my_block], uint32_t{kCandidates}));
#pragma unroll 1
    for (int pass = 1; pass < 3 && left < num_prefix; ++pass) {
      const uint32_t mask = pass == 1 ? 2047 : 1023;
      const auto count = [&](uint32_t x) {
        if ((x & known) == prefix) atomicAdd(&s.counts[(x >> ChoiceShift(pass)) & mask], 1);
      };
      if (pass > 1) {
        for (int i = threadIdx.x; i < kChoiceDigits; i += kThreads) s.counts[i] = 0;
        __syncthreads();
      }
      if (complete) {
        for (int i = my_first; i < my_candidates; i += kShare) count(s.candidates[my_block][i]);
        __syncthreads();
        FindDigit(s.counts, s, left);
      } else {
        if constexpr (kBlocks > 1) {
          for (int i = threadIdx.x; i < kChoiceDigits; i += kThreads) s.all[i] = 0;
          C::Sync();  // nobody adds before everybody's are zero
        }
        for (int i = threadIdx.x; i < num_items; i += kThreads) count(key(i));
        AddUpBlocks(s);
        FindDigit(kBlocks == 1 ? s.counts : s.all, s, left);
      }
      prefix |= s.digit << ChoiceShift(pass);
      known |= mask << ChoiceShift(pass);
      left = s.left;
      num_prefix = s.num_digit;
      __syncthreads();
    }

    // Taken: the keys above `prefix` in the known bits, and of those equal to it the first `left`.
    uint32_t above = 0, equal = 0;  // in front of this block's items
    if (complete) {
      uint32_t some_above = 0, some_equal = 0;
      if (my_block < rank) {
        for (int i = my_first; i < my_candidates; i += kShare) {
          const uint32_t x = s.candidates[my_block][i] & known;
          some_above += x > prefix;
          some_equal += x == prefix;
        }
      }
      if constexpr (kBlocks > 1) {
        // Without a further digit no candidate was handed out; all of them are equal to the prefix.
        const bool listed = known != ~0u << ChoiceShift(0);
        some_above = __reduce_add_sync(0xffffffffu, some_above);
        some_equal = __reduce_add_sync(0xffffffffu, some_equal);
        if (listed && lane == 0 && some_above != 0) atomicAdd(&s.before_above, some_above);
        if (listed && lane == 0 && some_equal != 0) atomicAdd(&s.before_equal, some_equal);
        __syncthreads();
        above = s.before_above;
        equal = s.before_equal;
        for (int b = 0; b < rank; ++b) {
          above += s.num_above[b];
          if (!listed) equal += s.num_candidates[b];
        }
      }
    } else if constexpr (kBlocks > 1) {
      if (threadIdx.x < kBlocks) s.num_above[threadIdx.x] = s.num_candidates[threadIdx.x] = 0;
      C::Sync();
      num_above = num_equal = 0;
      for (int i = threadIdx.x; i < num_items; i += kThreads) {
        const uint32_t x = key(i) & known;
        num_above += x > prefix;
        num_equal += x == prefix;
      }
      const uint32_t all_above = __reduce_add_sync(0xffffffffu, num_above);
      const uint32_t all_equal = __reduce_add_sync(0xffffffffu, num_equal);
      if (lane < kBlocks) {
        C::Add(&s.num_above[rank], lane, all_above);
        C::Add(&s.num_candidates[rank], lane, all_equal);
      }
      C::Sync();
      for (int b = 0; b < rank; ++b) above += s.num_above[b], equal += s.num_candidates[b];
    }
    // kThreads x 4 items at a time, four consecutive ones a thread. Counts: above, equal << 16.
    for (int begin = 0; begin < num_items; begin += 4 * kThreads) {
      const int first = begin + 4 * static_cast<int>(threadIdx.x);
      uint32_t x[4] = {};
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < num_items) {
          x[i] = key(first + i) & known;
          count += x[i] > prefix ? 1u : x[i] == prefix ? 1u << 16 : 0u;
        }
      }
      uint32_t sum = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      __syncthreads();  // everybody is done with the sums of the step before
      if (lane == 31) s.warp_sums[warp] = static_cast<int>(sum);
      __syncthreads();
      const uint32_t of_warp = lane < kWarps ? static_cast<uint32_t>(s.warp_sums[lane]) : 0;
      const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0) + sum - count;
      const uint32_t total = __reduce_add_sync(0xffffffffu, of_warp);
      uint32_t my_above = above + (before & 0xffff), my_equal = equal + (before >> 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= num_items) continue;
        if (x[i] > prefix) {
          emit(first + i, static_cast<int>(my_above + min(my_equal, static_cast<uint32_t>(left))));
          ++my_above;
        } else if (x[i] == prefix) {
          if (my_equal < static_cast<uint32_t>(left)) emit(first + i, static_cast<int>(my_above + my_equal));
          ++my_equal;
        }
      }
      above += total & 0xffff;
      equal += total >> 16;
    }
  }

 private:
  // The sum of every block's counts, once all threads have counted; empty bins, which most are, are left out.
  static __device__ __forceinline__ void AddUpBlocks(Smem& s) {
    __syncthreads();
    if constexpr (kBlocks > 1) {
#pragma unroll
      for (int i = 0; i < kBins; ++i) {
        const int bin = i * kThreads + threadIdx.x;
        const auto count = static_cast<uint32_t>(s.counts[bin]);
        if (count == 0) continue;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) C::Add(reinterpret_cast<uint32_t*>(&s.all[bin]), b, count);
      }
      C::Sync();
    }
  }

  // The digit of the left-th largest of what was counted, how many of that digit are among them, how many have it.
  static __device__ __forceinline__ void FindDigit(const int* counts, Smem& s, int left) {
    const int high = kChoiceDigits - 1 - kBins * static_cast<int>(threadIdx.x);  // this thread's largest digit
    int mine[kBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; ++i) sum += mine[i] = counts[high - i];
    int above = ExclusiveSum<kThreads>(sum, s.warp_sums);
    if (above < left && above + sum >= left) {  // one thread
#pragma unroll
      for (int i = 0; i < kBins; ++i) {
        if (above < left && above + mine[i] >= left) {
          s.digit = static_cast<uint32_t>(high - i);
          s.left = left - above;
          s.num_digit = mine[i];
        }
        above += mine[i];
      }
    }
    __syncthreads();
  }
};

}  // namespace spl::kernels::cuda
