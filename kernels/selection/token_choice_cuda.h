// The choice of the k items of the largest keys by a cluster of blocks, each of which holds consecutive items, written
// in ascending order: what SelectTokens and TopTokens share on a device. Included by .cu files only.
//
// Exact and the same bits every time. Items are ordered by key, then by index, the lower one first: no two are equal,
// and the choice is a cutoff. Each block counts its keys in bins and adds its counts to all blocks'; the bin of the
// cutoff is known then, and every block is given the few items of all blocks that are in it. A barrier of the cluster
// costs more than the work between two of them, so each block ranks those by itself. When there are too many of them
// the cutoff is found digit by digit instead, with barriers for each.
#pragma once

#include "kernels/cuda/cuda_cluster.h"

namespace spl::kernels::cuda {

inline constexpr int kChoiceBins = 2048;
inline constexpr uint32_t kForcedKey = ~0u;  // above every other key

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0; below kForcedKey.
__device__ __forceinline__ uint32_t OrderedKey(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// Of a weight, which is not negative; NaN is 0.
__device__ __forceinline__ uint32_t WeightKey(float weight) { return weight > 0 ? __float_as_uint(weight) : 0; }

// Bins of equal width from `base` on; what is below or above all of them is in the first or the last one.
struct ChoiceBins {
  uint32_t base;
  int shift;
  __device__ __forceinline__ uint32_t operator()(uint32_t key) const {
    return key <= base ? 0 : min((key - base) >> shift, uint32_t{kChoiceBins - 1});
  }
  __device__ __forceinline__ uint32_t Lowest(uint32_t bin) const { return bin == 0 ? 0 : base + (bin << shift); }
};
// For weights of which none is above `most`: 32 bins for each of 64 octaves. A bin in use costs a block an addition in
// every block of the cluster, an item of the cutoff's bin a store; with weights all of one magnitude this balances
// them.
__device__ __forceinline__ ChoiceBins WeightBins(float most) {
  constexpr int kShift = 23 - 5;
  const uint32_t key = WeightKey(most);
  return {key > (uint32_t{kChoiceBins} << kShift) ? key - (uint32_t{kChoiceBins} << kShift) : 0, kShift};
}

template <int kBlocks, int kThreads>
struct TokenChoice {
  using C = Cluster<kBlocks>;
  static constexpr int kWarps = kThreads / 32;
  // Of each block that all blocks are given. All are compared with all; beyond some hundreds digits are faster.
  static constexpr int kCandidates = kBlocks == 1 ? 256 : 1024 / kBlocks;
  static constexpr int kBins = kChoiceBins / kThreads;
  static_assert(kBins >= 2 && kBins % 2 == 0 && kThreads % kBlocks == 0);

  struct Smem {
    uint32_t counts[kChoiceBins];  // of this block's keys
    uint32_t all[kChoiceBins];     // of the keys of all blocks
    uint64_t candidates[kBlocks][kCandidates];
    uint32_t num_candidates[kBlocks];  // of each block; more than kCandidates: not all are here
    uint32_t num_above[kBlocks];       // of each block: items of a larger bin
    uint32_t num_mine, before;
    uint64_t cutoff;
    uint32_t warp_sums[32];
    uint32_t bin, left, num_in_bin;
  };

  // By all threads, before the first Count and with a barrier of the cluster between it and Choose: every block's words
  // are zero before another block adds to them.
  static __device__ __forceinline__ void Clear(Smem& s) {
    for (int i = threadIdx.x; i < kChoiceBins; i += kThreads) s.counts[i] = s.all[i] = 0;
    if (threadIdx.x < kBlocks) s.num_candidates[threadIdx.x] = s.num_above[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_mine = s.before = 0;
  }
  // Each key of the block once, after a barrier behind Clear.
  static __device__ __forceinline__ void Count(Smem& s, const ChoiceBins& bins, uint32_t key) {
    atomicAdd(&s.counts[bins(key)], 1u);
  }

  // keys(i) are those of items i to i + 3 of this block's [0, num_items), i a multiple of 4; what is past the end is
  // not looked at. first is the index of item 0 in the cluster. emit(i, place) for the items chosen, place in [0, k); k
  // is at least 1 and at most the items of the cluster. All threads; all keys have been counted.
  template <typename Keys, typename Emit>
  static __device__ __forceinline__ void Choose(Smem& s, int rank, uint32_t first, int num_items, uint32_t k,
                                                const ChoiceBins& bins, const Keys& keys, const Emit& emit) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const auto item = [&](uint32_t key, int i) { return static_cast<uint64_t>(key) << 32 | ~(first + i); };
    // body(item, index) for this block's items.
    const auto for_each = [&](const auto& body) {
      for (int i = 4 * t; i < num_items; i += 4 * kThreads) {
        const uint4 x = keys(i);
        body(x.x, i);
        if (i + 1 < num_items) body(x.y, i + 1);
        if (i + 2 < num_items) body(x.z, i + 2);
        if (i + 3 < num_items) body(x.w, i + 3);
      }
    };
    AddUpBlocks(s);
    FindBin(kBlocks == 1 ? s.counts : s.all, s, k);
    const uint32_t bin = s.bin, left = s.left, num_in_bin = s.num_in_bin;

    uint32_t num_above = 0, num_equal = 0;
    for_each([&](uint32_t key, int i) {
      const uint32_t b = bins(key);
      num_above += b > bin;
      if (b != bin) return;
      ++num_equal;
      if (left == num_in_bin) return;
      const uint32_t at = atomicAdd(&s.num_mine, 1u);  // in any order
      if (at >= kCandidates) return;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) C::Store(&s.candidates[rank][at], block, item(key, i));
    });
    AddCounts(s, rank, num_above, num_equal);
    C::Sync();
    uint32_t before = 0;  // items chosen in front of this block's
    bool complete = true;
    for (int b = 0; b < kBlocks; ++b) {
      complete &= s.num_candidates[b] <= kCandidates;
      if (b < rank) before += s.num_above[b];
    }
    uint64_t cutoff;
    if (left == num_in_bin) {  // all of the bin are taken
      cutoff = static_cast<uint64_t>(bins.Lowest(bin)) << 32;
      for (int b = 0; b < rank; ++b) before += s.num_candidates[b];
    } else if (complete) {
      Rank(s, rank, left);
      cutoff = s.cutoff;
      before += s.before;
    } else {
      cutoff = FindCutoff(s, k, item, for_each);
      num_above = 0;
      for_each([&](uint32_t key, int i) { num_above += item(key, i) >= cutoff; });
      if (t < kBlocks) s.num_above[t] = 0;
      C::Sync();
      AddCounts(s, rank, num_above, 0);
      C::Sync();
      before = 0;
      for (int b = 0; b < rank; ++b) before += s.num_above[b];
    }
    for (int begin = 0; begin < num_items; begin += 4 * kThreads) {
      const int i = begin + 4 * t;
      uint32_t taken = 0;  // bit n: item i + n
      if (i < num_items) {
        const uint4 x = keys(i);
        taken = (item(x.x, i) >= cutoff ? 1u : 0) | (i + 1 < num_items && item(x.y, i + 1) >= cutoff ? 2u : 0) |
                (i + 2 < num_items && item(x.z, i + 2) >= cutoff ? 4u : 0) |
                (i + 3 < num_items && item(x.w, i + 3) >= cutoff ? 8u : 0);
      }
      uint32_t place = __popc(taken);
      const uint32_t mine = place;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, place, offset);
        if (lane >= offset) place += other;
      }
      if (begin > 0) __syncthreads();  // everybody is done with the sums of the step before
      if (lane == 31) s.warp_sums[warp] = place;
      __syncthreads();
      const uint32_t of_warp = lane < kWarps ? s.warp_sums[lane] : 0;
      place += before - mine + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
      before += __reduce_add_sync(0xffffffffu, of_warp);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (taken >> n & 1) emit(i + n, static_cast<int>(place++));
      }
    }
  }

 private:
  // The sum of every block's counts, once all threads have counted; empty bins are left out, two go at a time.
  static __device__ __forceinline__ void AddUpBlocks(Smem& s) {
    __syncthreads();
    if constexpr (kBlocks > 1) {
#pragma unroll
      for (int i = 0; i < kBins / 2; ++i) {
        const int at = 2 * (i * kThreads + threadIdx.x);
        const uint64_t counts = *reinterpret_cast<const uint64_t*>(&s.counts[at]);
        if (counts == 0) continue;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) C::Add(reinterpret_cast<uint64_t*>(&s.all[at]), b, counts);
      }
      C::Sync();
    }
  }

  // To every block's num_above[rank] and num_candidates[rank].
  static __device__ __forceinline__ void AddCounts(Smem& s, int rank, uint32_t num_above, uint32_t num_equal) {
    const int lane = threadIdx.x % 32;
    num_above = __reduce_add_sync(0xffffffffu, num_above);
    num_equal = __reduce_add_sync(0xffffffffu, num_equal);
    if (lane >= kBlocks) return;
    if (num_above != 0) C::Add(&s.num_above[rank], lane, num_above);
    if (num_equal != 0) C::Add(&s.num_candidates[rank], lane, num_equal);
  }

  // The bin of the left-th largest of what was counted, how many of it are among them, how many are in it.
  static __device__ __forceinline__ void FindBin(const uint32_t* counts, Smem& s, uint32_t left) {
    const int high = kChoiceBins - 1 - kBins * static_cast<int>(threadIdx.x);  // this thread's largest bin
    uint32_t mine[kBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; i += 2) {
      const uint64_t pair = *reinterpret_cast<const uint64_t*>(&counts[high - i - 1]);
      mine[i] = static_cast<uint32_t>(pair >> 32);
      mine[i + 1] = static_cast<uint32_t>(pair);
      sum += mine[i] + mine[i + 1];
    }
    auto above =
        static_cast<uint32_t>(ExclusiveSum<kThreads>(static_cast<int>(sum), reinterpret_cast<int*>(s.warp_sums)));
    if (above < left && above + sum >= left) {  // one thread
#pragma unroll
      for (int i = 0; i < kBins; ++i) {
        if (above < left && above + mine[i] >= left) {
          s.bin = static_cast<uint32_t>(high - i);
          s.left = left - above;
          s.num_in_bin = mine[i];
        }
        above += mine[i];
      }
    }
    __syncthreads();
  }

  // s.cutoff: the left-th largest candidate; s.before: those not below it of the blocks in front.
  static __device__ __forceinline__ void Rank(Smem& s, int rank, uint32_t left) {
    constexpr int kShare = kThreads / kBlocks;
    const int block = threadIdx.x / kShare;
    const auto num = static_cast<int>(s.num_candidates[block]);
    for (int i = threadIdx.x % kShare; i < num; i += kShare) {
      const uint64_t mine = s.candidates[block][i];
      uint32_t larger = 0;
      for (int b = 0; b < kBlocks; ++b) {
        const auto n = static_cast<int>(s.num_candidates[b]);
#pragma unroll 4
        for (int j = 0; j < n; ++j) larger += s.candidates[b][j] > mine;
      }
      if (larger < left && block < rank) atomicAdd(&s.before, 1u);
      if (larger + 1 == left) s.cutoff = mine;
    }
    __syncthreads();
  }

  // The k-th largest item, 11 bits at a time.
  template <typename Item, typename ForEach>
  static __device__ __noinline__ uint64_t FindCutoff(Smem& s, uint32_t left, const Item& item,
                                                     const ForEach& for_each) {
    uint64_t prefix = 0, known = 0;
    for (int shift = 53; known != ~uint64_t{0}; shift = max(shift - 11, 0)) {
      const uint64_t digits = (~uint64_t{0} << shift) & ~known;  // 11 bits, 9 at the end
      __syncthreads();
      for (int i = threadIdx.x; i < kChoiceBins; i += kThreads) s.counts[i] = s.all[i] = 0;
      C::Sync();
      for_each([&](uint32_t key, int i) {
        const uint64_t x = item(key, i);
        if ((x & known) == prefix) atomicAdd(&s.counts[(x & digits) >> shift], 1u);
      });
      AddUpBlocks(s);
      FindBin(kBlocks == 1 ? s.counts : s.all, s, left);
      prefix |= static_cast<uint64_t>(s.bin) << shift;
      known |= digits;
      left = s.left;
    }
    return prefix;
  }
};

}  // namespace spl::kernels::cuda
