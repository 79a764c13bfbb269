// The choice of the k items of the largest keys by a cluster of blocks, each of which holds consecutive items, written
// in ascending order: what SelectTokens and TopTokens share on a device. Included by .cu files only.
//
// Exact and the same bits every time, whatever the size of the cluster. Items are ordered by key, then by index, the
// lower one first: no two are equal, and the choice is a cutoff. What blocks tell each other is what costs, so they
// tell little, and it is read where it lies rather than sent to all:
//   count    each block counts its keys in 64 x 32 bins and sums up each 32 of them;
//   find     every block reads the 64 sums of all blocks, then of all blocks the 32 bins of the one that has the
//   cutoff; refine   while the cutoff's bin holds too many items, that bin alone is counted anew in 2,048 bins; rank
//   the few items left are sent to all blocks, each of which ranks them by itself.
// Items of equal keys that are too many to rank need none of that: the first ones are taken.
#pragma once

#include "kernels/cuda/cuda_cluster.h"

namespace spl::kernels::cuda {

inline constexpr int kCoarseBins = 64, kFineBins = 32, kChoiceBins = kCoarseBins * kFineBins;
inline constexpr uint32_t kForcedKey = ~0u;  // above every other key

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0; below kForcedKey.
__device__ __forceinline__ uint32_t OrderedKey(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// Of a weight, which is not negative; NaN is 0.
__device__ __forceinline__ uint32_t WeightKey(float weight) { return weight > 0 ? __float_as_uint(weight) : 0; }

// Bins of keys from `top` downwards: half of them 2^shift keys wide, the others 2^far_shift. What is above `top` is in
// bin 0, what is below all of them in the last one.
struct ChoiceBins {
  static constexpr uint32_t kNear = kChoiceBins / 2, kLast = kChoiceBins - 1;
  uint32_t top;
  int shift, far_shift;

  __device__ __forceinline__ uint32_t operator()(uint32_t key) const {
    const uint32_t below = key >= top ? 0 : top - key, near = kNear << shift;
    return below < near ? below >> shift : min(kNear + ((below - near) >> far_shift), kLast);
  }
  // The largest and the smallest key of a bin.
  __device__ __forceinline__ uint32_t Highest(uint32_t bin) const { return bin == 0 ? kForcedKey : top - Below(bin); }
  __device__ __forceinline__ uint32_t Lowest(uint32_t bin) const {
    const uint32_t next = Below(bin + 1);
    return bin == kLast || next > top ? 0 : top - next + 1;
  }

 private:
  __device__ __forceinline__ uint32_t Below(uint32_t bin) const {
    return bin <= kNear ? bin << shift : (kNear << shift) + ((bin - kNear) << far_shift);
  }
};
// For the k-th largest of weights that add up to `total`: it is at most total / k. 128 bins for each of the 8 octaves
// below that, 32 for each of the 32 below those.
__device__ __forceinline__ ChoiceBins WeightBins(float total, int32_t k) {
  return {WeightKey(total / static_cast<float>(max(k, 1))), 23 - 7, 23 - 5};
}
// For keys in [lowest, highest].
__device__ __forceinline__ ChoiceBins BinsOf(uint32_t lowest, uint32_t highest) {
  const uint32_t width = highest - lowest;
  const int shift = width < uint32_t{kChoiceBins} ? 0 : 32 - 11 - __clz(static_cast<int>(width));
  return {highest, shift, shift};
}

template <int kBlocks, int kThreads>
struct TokenChoice {
  using C = Cluster<kBlocks>;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCandidates = 256;  // of all blocks; all are compared with all
  static constexpr int kBins = kChoiceBins / kThreads;
  static constexpr int kStep = 128;  // items of a warp at a time, four consecutive ones a lane
  static_assert(kBins >= 2 && kBins % 2 == 0 && kFineBins % kBins == 0 && kFineBins == 32 && kCoarseBins == 64);

  struct alignas(16) Smem {
    // Read by the other blocks; two, so that one may be cleared while they still read the other.
    struct Counts {
      uint32_t fine[kChoiceBins];
      uint32_t coarse[kCoarseBins];
    } counts[2];
    uint64_t candidates[kCandidates];         // written by all blocks
    uint32_t coarse[kBlocks][kCoarseBins];    // of each block
    uint32_t fine[kBlocks][kFineBins];        // of each block, of the coarse bin that has the cutoff
    uint32_t above[kBlocks];                  // of each block: items in larger coarse bins
    uint32_t warp_above[32], warp_equal[32];  // of each warp of this block: items above the cutoff's bin, in it
    uint32_t warp_taken[32];                  // of each warp of this block: candidates taken
    uint32_t num_mine, before;
    uint64_t cutoff;
  };

  // By all threads, with a barrier of the block between it and the first Count.
  static __device__ __forceinline__ void Clear(Smem& s) {
    ClearCounts(s.counts[0]);
    ClearCounts(s.counts[1]);
    if (threadIdx.x < 32) s.warp_taken[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_mine = s.before = 0;
  }
  // Each key of the block once.
  static __device__ __forceinline__ void Count(Smem& s, const ChoiceBins& bins, uint32_t key) {
    atomicAdd(&s.counts[0].fine[bins(key)], 1u);
  }

  // keys(i) are those of items i to i + 3 of this block's [0, num_items), i a multiple of 4; what is past the end is
  // not looked at. first is the index of item 0 in the cluster. emit(i, place) for the items chosen, place in [0, k); k
  // is at least 1 and at most the items of the cluster. All threads of all blocks; all keys have been counted; a block
  // may end when it returns.
  template <typename Keys, typename Emit>
  static __device__ __forceinline__ void Choose(Smem& s, int rank, uint32_t first, int num_items, uint32_t k,
                                                ChoiceBins bins, const Keys& keys, const Emit& emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A warp has consecutive items. body(i, key, valid) for four a lane, all lanes of a warp together.
    const int share = (num_items + kStep * kWarps - 1) / (kStep * kWarps) * kStep;
    const int begin = min(warp * share, num_items), end = min(begin + share, num_items);
    const auto for_each = [&](const auto& body) {
      for (int from = begin; from < end; from += kStep) {
        const int i = from + 4 * lane;
        const uint4 x = i < end ? keys(i) : uint4{};
        const uint32_t key[4] = {x.x, x.y, x.z, x.w};
        body(i, key);
      }
    };

    Cutoff cut = Find(s, rank, k, 0);
    uint32_t before = cut.before;  // items chosen in front of this block's
    uint32_t lowest = bins.Lowest(cut.bin), highest = bins.Highest(cut.bin);
    for (int level = 1; cut.left < cut.num && cut.num > kCandidates && lowest < highest; ++level) {
      if (level > 1) ClearCounts(s.counts[level % 2]);  // level 1 finds it clear
      __syncthreads();
      bins = BinsOf(lowest, highest);
      for_each([&](int i, const uint32_t(&key)[4]) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (i + n < end && key[n] >= lowest && key[n] <= highest)
            atomicAdd(&s.counts[level % 2].fine[bins(key[n])], 1u);
        }
      });
      cut = Find(s, rank, cut.left, level % 2);
      before += cut.before;
      highest = min(highest, bins.Highest(cut.bin));
      lowest = max(lowest, bins.Lowest(cut.bin));
    }
    const bool ranked = cut.left < cut.num && cut.num <= kCandidates;
    const auto item = [&](uint32_t key, int i) { return static_cast<uint64_t>(key) << 32 | ~(first + i); };

    uint32_t num_above = 0, num_equal = 0;
    for_each([&](int i, const uint32_t(&key)[4]) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (i + n >= end || key[n] < lowest) continue;
        num_above += key[n] > highest;
        if (key[n] > highest) continue;
        ++num_equal;
        if (!ranked) continue;
        const uint32_t at = cut.start + atomicAdd(&s.num_mine, 1u);  // in any order
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) C::Store(&s.candidates[at], block, item(key[n], i + n));
      }
    });
    num_above = __reduce_add_sync(0xffffffffu, num_above);
    num_equal = __reduce_add_sync(0xffffffffu, num_equal);
    if (lane == 0) s.warp_above[warp] = num_above, s.warp_equal[warp] = num_equal;
    __syncwarp();
    C::Arrive();  // this block has read what it reads of the others, and sent what it sends
    uint64_t cutoff = 0;
    uint32_t quota = 0;  // of this warp's items in the cutoff's bin, the first ones
    if (ranked) {
      C::Wait();
      Rank(s, cut, first, share);
      cutoff = s.cutoff;
      before += s.before;
    } else {
      __syncthreads();
      before += min(cut.start, cut.left);
      // Of this block: what the blocks in front have left over, then what the warps in front have.
      const uint32_t of_block = min(cut.left - min(cut.start, cut.left), cut.mine);
      const uint32_t of_warps = __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_equal[lane] : 0);
      quota = min(of_block - min(of_warps, of_block), num_equal);
      before += min(of_warps, of_block);
    }
    before += __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_above[lane] + (ranked ? s.warp_taken[lane] : 0) : 0);
    const uint32_t below = (1u << lane) - 1;
    for_each([&](int i, const uint32_t(&key)[4]) {
      bool taken[4];
      if (ranked) {
#pragma unroll
        for (int n = 0; n < 4; ++n) taken[n] = i + n < end && item(key[n], i + n) >= cutoff;
      } else {
        uint32_t at = 0, all = 0;  // of the items in the cutoff's bin: this lane's first one, how many
        bool equal[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          equal[n] = i + n < end && key[n] >= lowest && key[n] <= highest;
          const uint32_t lanes = __ballot_sync(0xffffffffu, equal[n]);
          at += __popc(lanes & below);
          all += __popc(lanes);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          taken[n] = i + n < end && (key[n] > highest || (equal[n] && at < quota));
          at += equal[n];
        }
        quota -= min(quota, all);
      }
      uint32_t place = before;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t lanes = __ballot_sync(0xffffffffu, taken[n]);
        place += __popc(lanes & below);
        before += __popc(lanes);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (taken[n]) emit(i + n, static_cast<int>(place++));
      }
    });
    if (!ranked) C::Wait();
  }

 private:
  // The bin of the left-th largest of what was counted.
  struct Cutoff {
    uint32_t bin;
    uint32_t left, num;  // how many of the bin are among them; how many are in it
    uint32_t before;     // items of larger bins of the blocks in front of this one
    uint32_t start;      // items of the bin of the blocks in front of this one
    uint32_t mine;       // items of the bin of this block
  };

  static __device__ __forceinline__ void ClearCounts(typename Smem::Counts& counts) {
    for (int i = threadIdx.x; i < kChoiceBins / 4; i += kThreads) reinterpret_cast<uint4*>(counts.fine)[i] = uint4{};
  }

  // All threads, once they have counted.
  static __device__ __forceinline__ Cutoff Find(Smem& s, int rank, uint32_t left, int which) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    auto& counts = s.counts[which];
    __syncthreads();
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(&counts.fine[t * kBins + i]);
      sum += two.x + two.y;
    }
    constexpr int kLanes = kFineBins / kBins;  // of a coarse bin
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane % kLanes == 0) counts.coarse[t / kLanes] = sum;
    C::Sync();
    for (int i = t; i < kBlocks * kCoarseBins; i += kThreads)
      s.coarse[i / kCoarseBins][i % kCoarseBins] = C::Load(&counts.coarse[i % kCoarseBins], i / kCoarseBins);
    __syncthreads();
    // Every warp by itself, two coarse bins a lane.
    uint2 of_bins{};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint2 x = *reinterpret_cast<const uint2*>(&s.coarse[b][2 * lane]);
      of_bins.x += x.x;
      of_bins.y += x.y;
    }
    const uint32_t through = InclusiveSum(of_bins.x + of_bins.y);
    const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, through >= left))) - 1;
    const uint32_t in_front = __shfl_sync(0xffffffffu, through - of_bins.x - of_bins.y, owner);
    const uint32_t in_first = __shfl_sync(0xffffffffu, of_bins.x, owner);
    const bool second = in_front + in_first < left;
    const int coarse = 2 * owner + second;
    left -= in_front + (second ? in_first : 0);
    for (int b = warp; b < kBlocks; b += kWarps) {
      s.fine[b][lane] = C::Load(&counts.fine[coarse * kFineBins + lane], b);
      const uint2 x = *reinterpret_cast<const uint2*>(&s.coarse[b][2 * lane]);
      const uint32_t above =
          __reduce_add_sync(0xffffffffu, (2 * lane < coarse ? x.x : 0) + (2 * lane + 1 < coarse ? x.y : 0));
      if (lane == 0) s.above[b] = above;
    }
    __syncthreads();
    uint32_t all = 0, in_blocks = 0;  // of this lane's bin: items of all blocks, of those in front
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t x = s.fine[b][lane];
      all += x;
      in_blocks += b < rank ? x : 0;
    }
    const uint32_t sums = InclusiveSum(all);
    const int fine = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, sums >= left))) - 1;
    Cutoff cut;
    cut.bin = static_cast<uint32_t>(coarse * kFineBins + fine);
    cut.num = __shfl_sync(0xffffffffu, all, fine);
    cut.left = left - (__shfl_sync(0xffffffffu, sums, fine) - cut.num);
    cut.before = __reduce_add_sync(0xffffffffu, (lane < fine ? in_blocks : 0) + (lane < rank ? s.above[lane] : 0));
    cut.start = __shfl_sync(0xffffffffu, in_blocks, fine);
    cut.mine = s.fine[rank][fine];
    return cut;
  }

  // Once all candidates are there. s.cutoff: the left-th largest of them; s.before, s.warp_taken: how many are not
  // below it of the blocks in front and of each warp of this block, which has `share` items.
  static __device__ __forceinline__ void Rank(Smem& s, const Cutoff& cut, uint32_t first, int share) {
    constexpr int kTogether = 8;  // lanes of a candidate
    const auto num = static_cast<int>(cut.num);
    const int part = threadIdx.x % kTogether;
    for (int from = 0; from < num; from += kThreads / kTogether) {
      const int i = from + static_cast<int>(threadIdx.x) / kTogether;
      const uint64_t mine = s.candidates[min(i, num - 1)];
      uint32_t larger = 0;
#pragma unroll 4
      for (int j = part; j < num; j += kTogether) larger += s.candidates[j] > mine;
#pragma unroll
      for (int offset = kTogether / 2; offset > 0; offset /= 2) larger += __shfl_xor_sync(0xffffffffu, larger, offset);
      if (i >= num || part != 0 || larger >= cut.left) continue;
      if (larger + 1 == cut.left) s.cutoff = mine;
      if (static_cast<uint32_t>(i) < cut.start) {
        atomicAdd(&s.before, 1u);
      } else if (static_cast<uint32_t>(i) < cut.start + cut.mine) {
        atomicAdd(&s.warp_taken[(~static_cast<uint32_t>(mine) - first) / static_cast<uint32_t>(share)], 1u);
      }
    }
    __syncthreads();
  }
};

}  // namespace spl::kernels::cuda
