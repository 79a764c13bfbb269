// Chooses the k items with the largest keys by a cluster of blocks, and writes them in ascending order: shared by
// SelectTokens and TopTokens on a device. Each block holds consecutive items. Included by .cu files only.
//
// Exact, and the same bits every time, whatever the size of the cluster. Items are ordered by key, then by index, the
// lower one first: no two are equal, and the choice is a cutoff. Communication between blocks is what costs, so blocks
// share little, and read it where it lies instead of sending it to all.
// - Count: each block counts its keys in 64 x 32 bins, and sums each group of 32.
// - Find: every block reads the 64 sums of all blocks, then all blocks' 32 bins of the group that has the cutoff.
// - Refine: while the cutoff's bin holds too many items, that bin alone is counted anew in 2,048 bins.
// - Rank: the few items left are sent to all blocks, and each block ranks them by itself.
// Items of equal keys that are too many to rank are not ranked: the first ones are taken. Chosen items are marked in
// bits, and a list is written from those.
#pragma once

#include "kernels/cuda/cuda_cluster.h"

namespace spl::kernels::cuda {

inline constexpr int kCoarseBins = 64, kFineBins = 32, kChoiceBins = kCoarseBins * kFineBins;
inline constexpr uint32_t kForcedKey = ~0u;  // above every other key

// Key whose unsigned order is the order of the scores: NaN lowest, -0 equal to +0, all below kForcedKey.
__device__ __forceinline__ uint32_t OrderedKey(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
// Key of a weight, which is not negative; NaN counts as 0.
__device__ __forceinline__ uint32_t WeightKey(float weight) { return weight > 0 ? __float_as_uint(weight) : 0; }

// Bins of 2^shift keys each, from `top` downwards. Keys above `top` are in bin 0, keys below all bins in the last one.
struct ChoiceBins {
  static constexpr uint32_t kLast = kChoiceBins - 1;
  uint32_t top;
  int shift;

  __device__ __forceinline__ uint32_t operator()(uint32_t key) const {
    return min((max(top, key) - key) >> shift, kLast);
  }
  // The largest and the smallest key of a bin.
  __device__ __forceinline__ uint32_t Highest(uint32_t bin) const {
    return bin == 0 ? kForcedKey : top - (bin << shift);
  }
  __device__ __forceinline__ uint32_t Lowest(uint32_t bin) const {
    const uint32_t next = (bin + 1) << shift;
    return bin == kLast || next > top ? 0 : top - next + 1;
  }
};
// Bins for the k-th largest of weights that add up to `total`, which is at most total / k: 128 bins for each of the 16
// octaves below that.
__device__ __forceinline__ ChoiceBins WeightBins(float total, int32_t k) {
  return {WeightKey(total / static_cast<float>(max(k, 1))), 23 - 7};
}
// Bins for keys in [lowest, highest].
__device__ __forceinline__ ChoiceBins BinsOf(uint32_t lowest, uint32_t highest) {
  const uint32_t width = highest - lowest;
  const int shift = width < uint32_t{kChoiceBins} ? 0 : 32 - 11 - __clz(static_cast<int>(width));
  return {highest, shift};
}

// kTold: all blocks of the cluster run before the first key is counted, so that each may write to the others.
template <int kBlocks, int kThreads, bool kTold = false>
struct TokenChoice {
  using C = Cluster<kBlocks>;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCandidates = 256;  // for all blocks together; each is compared with each
  static constexpr int kBins = kChoiceBins / kThreads;
  static constexpr int kTile = 64;  // items per warp at a time, two per lane
  static_assert(kBins >= 2 && kBins % 2 == 0 && kFineBins % kBins == 0 && kFineBins == 32 && kCoarseBins == 64);

  // The bin that holds the left-th largest of the counted items.
  struct Cutoff {
    uint32_t bin;
    uint32_t left, num;  // items of the bin among the left largest; items in the bin
    uint32_t before;     // items of larger bins in earlier blocks
    uint32_t start;      // items of the bin in earlier blocks
    uint32_t mine;       // items of the bin in this block
  };

  struct alignas(16) Smem {
    // Read by the other blocks; two, so that one may be cleared while they still read the other.
    struct Counts {
      uint32_t fine[kChoiceBins];
      uint32_t coarse[kTold ? kBlocks : 1][kCoarseBins];  // sums of this block, or told by each
    } counts[2];
    uint64_t candidates[kCandidates];                         // each block writes its own in all blocks
    uint32_t warp_above[32], warp_equal[32], warp_taken[32];  // items of each warp: see Choose
    Cutoff cut;
    uint32_t num_mine, before;
  };

  // Called by all threads; a barrier of the block must stand between it and the first Count.
  static __device__ __forceinline__ void Clear(Smem& s) {
    ClearCounts(s.counts[0]);
    ClearCounts(s.counts[1]);
    if (threadIdx.x < 32) s.warp_taken[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_mine = s.before = 0;
  }
  // Called once for each key of the block.
  static __device__ __forceinline__ void Count(Smem& s, const ChoiceBins& bins, uint32_t key) {
    atomicAdd(&s.counts[0].fine[bins(key)], 1u);
  }

  // Chooses k items of the cluster; calls emit(i, place), place in [0, k), for the chosen items i of this block. key(i)
  // is the key of item i of this block's [0, num_items). masks(tile) gives four words, 16-byte aligned, for the
  // marks of items [64 tile, 64 tile + 64); they may overlay those items' keys. first is the index of item 0 in the
  // cluster. k is at least 1 and at most the number of items in the cluster. Called by all threads of all blocks after
  // all keys have been counted. A block may end when it returns.
  template <typename Key, typename Masks, typename Emit>
  static __device__ __forceinline__ void Choose(Smem& s, int rank, uint32_t first, int num_items, uint32_t k,
                                                ChoiceBins bins, const Key& key, const Masks& masks, const Emit& emit) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int num_tiles = (num_items + kTile - 1) / kTile, share = (num_tiles + kWarps - 1) / kWarps;  // tiles per warp
    const int begin = min(warp * share, num_tiles), end = min(begin + share, num_tiles);

    // Calls body(tile, keys of this lane's two items); loads several tiles' keys at once, for they may be far away.
    const auto for_each_tile = [&](const auto& body) {
      constexpr int kAtOnce = 4;
#pragma unroll 1
      for (int from = begin; from < end; from += kAtOnce) {
        uint32_t x[kAtOnce][2];
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int i = (from + m) * kTile + 32 * n + lane;
            x[m][n] = from + m < end && i < num_items ? key(i) : 0;
          }
        }
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          if (from + m < end) body(from + m, x[m]);
        }
      }
    };

    const Range range = FindRange(s, rank, k, bins, [&](const auto& count) {
      for_each_tile([&](int tile, const uint32_t(&x)[2]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (tile * kTile + 32 * n + lane < num_items) count(x[n]);
        }
      });
    });
    const Cutoff& cut = range.cut;
    const uint32_t lowest = range.lowest, highest = range.highest;
    const bool ranked = range.ranked();
    uint32_t before = range.before;  // items chosen in earlier blocks

    uint32_t num_above = 0, num_equal = 0;  // this warp's items above the cutoff's bin, and in it
    for_each_tile([&](int tile, const uint32_t(&x)[2]) {
      const Marks marks = Mark(x, lowest, highest, num_items - tile * kTile);
      num_above += __popc(marks.above[0]) + __popc(marks.above[1]);
      num_equal += __popc(marks.equal[0]) + __popc(marks.equal[1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (ranked && marks.equal[n] >> lane & 1)  // in any order
          s.candidates[cut.start + atomicAdd(&s.num_mine, 1u)] =
              Candidate(x[n], first + static_cast<uint32_t>(tile * kTile + 32 * n + lane));
      }
      __syncwarp();  // the keys that may lie there have been read
      if (lane == 0)
        *reinterpret_cast<uint4*>(masks(tile)) = uint4{marks.above[0], marks.above[1], marks.equal[0], marks.equal[1]};
    });
    if (lane == 0) s.warp_above[warp] = num_above, s.warp_equal[warp] = num_equal;
    __syncthreads();
    uint32_t quota = 0;  // how many of this warp's items in the cutoff's bin are chosen: the first ones
    if (ranked) {
      SendCandidates(s, rank, cut);
      C::Sync();
      Rank(s, cut, [&](uint32_t index) {
        const auto i = static_cast<int>(index - first);
        atomicAdd(&s.warp_taken[i / kTile / share], 1u);
        atomicOr(masks(i / kTile) + i / 32 % 2, 1u << (i % 32));
      });
      before += s.before;
    } else {
      C::Arrive();  // this block no longer reads the others
      quota = Quota(s, cut, num_equal, before);
    }
    before += __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_above[lane] + s.warp_taken[lane] : 0);
#pragma unroll 1
    for (int from = 2 * begin; from < 2 * end; from += 32) {  // one word per lane
      const int word = from + lane;
      uint32_t taken = 0, equal = 0;
      if (word < 2 * end) {
        taken = masks(word / 2)[word % 2];
        if (quota > 0) equal = masks(word / 2)[2 + word % 2];
      }
      EmitWord(taken, equal, quota, before, [&](int bit, int place) { emit(word * 32 + bit, place); });
    }
    if (!ranked) C::Wait();
  }

 protected:
  // The keys of the cutoff's bin, after so many rounds that its items can be ranked or are all equal.
  struct Range {
    Cutoff cut;
    uint32_t before;           // larger items of earlier blocks
    uint32_t lowest, highest;  // keys
    __device__ __forceinline__ bool ranked() const { return cut.left < cut.num && cut.num <= kCandidates; }
  };
  // each(count) calls count(key) for each key of the block. All threads.
  template <typename Each>
  static __device__ __forceinline__ Range FindRange(Smem& s, int rank, uint32_t k, ChoiceBins bins, const Each& each) {
    Range r;
    r.cut = Find(s, rank, k, 0);
    r.before = r.cut.before;
    r.lowest = bins.Lowest(r.cut.bin), r.highest = bins.Highest(r.cut.bin);
#pragma unroll 1
    for (int level = 1; r.cut.left < r.cut.num && r.cut.num > kCandidates && r.lowest < r.highest; ++level) {
      auto& counts = s.counts[level % 2];
      if (level > 1) ClearCounts(counts);  // level 1 finds it clear
      __syncthreads();
      bins = BinsOf(r.lowest, r.highest);
      each([&](uint32_t key) {
        if (key >= r.lowest && key <= r.highest) atomicAdd(&counts.fine[bins(key)], 1u);
      });
      r.cut = Find(s, rank, r.cut.left, level % 2);
      r.before += r.cut.before;
      r.highest = min(r.highest, bins.Highest(r.cut.bin));
      r.lowest = max(r.lowest, bins.Lowest(r.cut.bin));
    }
    return r;
  }
  // Sends this block's candidates to the others.
  static __device__ __forceinline__ void SendCandidates(Smem& s, int rank, const Cutoff& cut) {
    if constexpr (kBlocks > 1) {
      for (int i = threadIdx.x; i < static_cast<int>(cut.mine) * kBlocks; i += kThreads) {
        uint64_t* at = &s.candidates[cut.start + static_cast<uint32_t>(i / kBlocks)];
        if (i % kBlocks != rank) C::Store(at, i % kBlocks, *at);
      }
    }
  }
  static __device__ __forceinline__ uint64_t Candidate(uint32_t key, uint32_t index) {
    return static_cast<uint64_t>(key) << 32 | ~index;
  }
  // Without ranking: how many of a warp's items in the cutoff's bin are chosen, the first ones; before: those of
  // earlier blocks and warps are added.
  static __device__ __forceinline__ uint32_t Quota(const Smem& s, const Cutoff& cut, uint32_t num_equal,
                                                   uint32_t& before) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    before += min(cut.start, cut.left);
    // The block takes what earlier blocks leave over, the warp what earlier warps leave over.
    const uint32_t of_block = min(cut.left - min(cut.start, cut.left), cut.mine);
    const uint32_t of_warps = __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_equal[lane] : 0);
    before += min(of_warps, of_block);
    return min(of_block - min(of_warps, of_block), num_equal);
  }
  // Items of one word per lane: bits `taken`, and the first `quota` of those in `equal`. Calls emit(bit, place) for
  // them in order, from place `before` on; both are brought behind them.
  template <typename Emit>
  static __device__ __forceinline__ void EmitWord(uint32_t taken, uint32_t equal, uint32_t& quota, uint32_t& before,
                                                  const Emit& emit) {
    if (quota > 0) {
      const auto num = static_cast<uint32_t>(__popc(equal));
      const uint32_t through = InclusiveSum(num), rest = quota - min(through - num, quota);
      while (static_cast<uint32_t>(__popc(equal)) > rest) equal ^= 0x80000000u >> __clz(static_cast<int>(equal));
      taken |= equal;
      quota -= min(__shfl_sync(0xffffffffu, through, 31), quota);
    }
    const auto num = static_cast<uint32_t>(__popc(taken));
    const uint32_t through = InclusiveSum(num);
    for (uint32_t place = before + through - num; taken != 0; taken &= taken - 1)
      emit(__ffs(static_cast<int>(taken)) - 1, static_cast<int>(place++));
    before += __shfl_sync(0xffffffffu, through, 31);
  }

  // Bits of a tile's items.
  struct Marks {
    uint32_t above[2], equal[2];  // larger than `highest`; in [lowest, highest]
  };
  // x: the keys of this lane's two items; num_items: of the tile and behind it.
  static __device__ __forceinline__ Marks Mark(const uint32_t (&x)[2], uint32_t lowest, uint32_t highest,
                                               int num_items) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Marks marks{};
    bool is_equal[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      is_equal[n] = x[n] >= lowest && x[n] <= highest && lane + 32 * n < num_items;
      marks.above[n] = __ballot_sync(0xffffffffu, x[n] > highest);
    }
    if (!__any_sync(0xffffffffu, is_equal[0] || is_equal[1])) return marks;  // as in most tiles
#pragma unroll
    for (int n = 0; n < 2; ++n) marks.equal[n] = __ballot_sync(0xffffffffu, is_equal[n]);
    return marks;
  }

  static __device__ __forceinline__ void ClearCounts(typename Smem::Counts& counts) {
    for (int i = threadIdx.x; i < kChoiceBins / 4; i += kThreads) reinterpret_cast<uint4*>(counts.fine)[i] = uint4{};
  }

  // Called by all threads once they have counted. Only the first warp looks at the others' counts: it takes as long as
  // all would, and carries less.
  static __device__ __forceinline__ Cutoff Find(Smem& s, int rank, uint32_t left, int which) {
    const int t = threadIdx.x, lane = t % 32;
    auto& counts = s.counts[which];
    __syncthreads();
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(&counts.fine[t * kBins + i]);
      sum += two.x + two.y;
    }
    constexpr int kLanes = kFineBins / kBins;  // lanes per coarse bin
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if constexpr (kTold) {
      static_assert(kLanes >= kBlocks);
      if (lane % kLanes < kBlocks) C::Store(&counts.coarse[rank][t / kLanes], lane % kLanes, sum);
    } else if (lane % kLanes == 0) {
      counts.coarse[0][t / kLanes] = sum;
    }
    C::Sync();
    if (t < 32) {
      // Two coarse bins per lane, two counts per word: items of all blocks, and items of earlier blocks.
      uint64_t pairs[kBlocks], all_pairs = 0, front_pairs = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        pairs[b] = kTold ? *reinterpret_cast<const uint64_t*>(&counts.coarse[kTold ? b : 0][2 * lane])
                         : C::Load(reinterpret_cast<const uint64_t*>(&counts.coarse[0][2 * lane]), b);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) all_pairs += pairs[b], front_pairs += b < rank ? pairs[b] : 0;
      const auto low = static_cast<uint32_t>(all_pairs), high = static_cast<uint32_t>(all_pairs >> 32);
      const uint32_t coarse_through = InclusiveSum(low + high);
      const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, coarse_through >= left))) - 1;
      const uint32_t in_front = __shfl_sync(0xffffffffu, coarse_through - low - high, owner);
      const uint32_t in_first = __shfl_sync(0xffffffffu, low, owner);
      const bool second = in_front + in_first < left;
      const int coarse = 2 * owner + (second ? 1 : 0);
      left -= in_front + (second ? in_first : 0);
      // Then one fine bin per lane.
      uint32_t x[kBlocks], all = 0, front = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) x[b] = C::Load(&counts.fine[coarse * kFineBins + lane], b);
      uint32_t before = (2 * lane < coarse ? static_cast<uint32_t>(front_pairs) : 0) +
                        (2 * lane + 1 < coarse ? static_cast<uint32_t>(front_pairs >> 32) : 0);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) all += x[b], front += b < rank ? x[b] : 0;
      const uint32_t through = InclusiveSum(all);
      const int fine = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, through >= left))) - 1;
      before = __reduce_add_sync(0xffffffffu, before + (lane < fine ? front : 0));
      if (lane == fine) {
        s.cut = Cutoff{static_cast<uint32_t>(coarse * kFineBins + fine),
                       left - (through - all),
                       all,
                       before,
                       front,
                       counts.fine[coarse * kFineBins + fine]};
      }
    }
    __syncthreads();
    return s.cut;
  }

  // Called once all candidates are there. Adds to s.before the candidates of earlier blocks that are among the `left`
  // largest; calls taken(index) for those of this block.
  template <typename Taken>
  static __device__ __forceinline__ void Rank(Smem& s, const Cutoff& cut, const Taken& taken) {
    constexpr int kTogether = 8;  // lanes per candidate
    const auto num = static_cast<int>(cut.num);
    const int part = threadIdx.x % kTogether;
#pragma unroll 1
    for (int from = 0; from < num; from += kThreads / kTogether) {
      const int i = from + static_cast<int>(threadIdx.x) / kTogether;
      const uint64_t mine = s.candidates[min(i, num - 1)];
      uint32_t larger = 0;
#pragma unroll 4
      for (int j = part; j < num; j += kTogether) larger += s.candidates[j] > mine;
#pragma unroll
      for (int offset = kTogether / 2; offset > 0; offset /= 2) larger += __shfl_xor_sync(0xffffffffu, larger, offset);
      const bool chosen = i < num && part == 0 && larger < cut.left;
      const bool front = chosen && static_cast<uint32_t>(i) < cut.start;
      const uint32_t fronts = __ballot_sync(0xffffffffu, front);
      if (threadIdx.x % 32 == 0 && fronts != 0) atomicAdd(&s.before, static_cast<uint32_t>(__popc(fronts)));
      if (chosen && !front && static_cast<uint32_t>(i) < cut.start + cut.mine) taken(~static_cast<uint32_t>(mine));
    }
    __syncthreads();
  }
};

}  // namespace spl::kernels::cuda
