// TokenChoice for blocks whose keys all lie in their shared memory: a thread looks at the keys of consecutive items and
// has their marks in a register, so that marking takes a few instructions a key. Included by .cu files only.
#pragma once

#include "kernels/selection/token_choice_cuda.h"

namespace spl::kernels::cuda {

template <int kBlocks, int kThreads>
class RunChoice : public TokenChoice<kBlocks, kThreads, true> {
  using Base = TokenChoice<kBlocks, kThreads, true>;
  using C = Cluster<kBlocks>;
  using typename Base::Range;

 public:
  using typename Base::Smem;

  // The places of a block's items among the chosen ones of all blocks. Keys below `lowest` are not chosen, those above
  // `highest` are, and of those in between all but a part of `rest`.
  struct Chosen {
    uint32_t first, num;
    uint32_t lowest, highest;
    float rest;
  };
  // As TokenChoice::Choose; keys [num_items] are below 2^31 and may be read to the next multiple of 32 items. Marks
  // take their place. places is in shared memory, and set behind the next barrier of the block; emit(i, n, place) is
  // called for the block's n-th item.
  template <typename Emit>
  static __device__ __forceinline__ void Choose(Smem& s, int rank, uint32_t first, int num_items, uint32_t k,
                                                const ChoiceBins& bins, uint32_t* keys, Chosen& places,
                                                const Emit& emit) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const Range range = Base::FindRange(s, rank, k, bins, [&](const auto& count) {
#pragma unroll 4
      for (int i = threadIdx.x; i < num_items; i += kThreads) count(keys[i]);
    });
    const Runs runs(num_items, keys);
    uint32_t num_above = 0, num_equal = 0;  // this warp's items above the cutoff's bin, and in it
#pragma unroll 1
    for (int round = 0; round < runs.rounds; ++round) {
      const int run = runs.Of(warp, round, lane), begin = run * runs.length;
      const Marks marks = Mark(runs, run, num_items, range.lowest, range.highest);
      num_above += __popc(marks.above), num_equal += __popc(marks.equal);
      if (range.ranked()) {
        for (uint32_t rest = marks.equal; rest != 0; rest &= rest - 1) {  // in any order
          const int i = begin + __ffs(static_cast<int>(rest)) - 1;
          uint64_t* const at = &s.candidates[range.cut.start + atomicAdd(&s.num_mine, 1u)];
          const uint64_t candidate = Base::Candidate(keys[i], first + static_cast<uint32_t>(i));
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) C::Store(at, b, candidate);
        }
      }
      if (begin < num_items) *runs.Word(run, 0) = marks.above, *runs.Word(run, 1) = marks.equal;
    }
    num_above = __reduce_add_sync(0xffffffffu, num_above), num_equal = __reduce_add_sync(0xffffffffu, num_equal);
    if (lane == 0) s.warp_above[warp] = num_above, s.warp_equal[warp] = num_equal;
    uint32_t quota = 0, before = range.before;
    if (range.ranked()) {
      C::Sync();
      Base::Rank(s, range.cut, [&](uint32_t index) {
        const int i = static_cast<int>(index - first), run = i >> runs.log_length;
        atomicAdd(&s.warp_taken[run / 32 / runs.rounds], 1u);
        atomicOr(runs.Word(run, 0), 1u << (i & (runs.length - 1)));
      });
      before += s.before;
    } else {
      __syncthreads();
      C::Arrive();  // this block no longer reads the others
      quota = Base::Quota(s, range.cut, num_equal, before);
    }
    const uint32_t first_place = range.before + (range.ranked() ? s.before : min(range.cut.start, range.cut.left));
    before += __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_above[lane] + s.warp_taken[lane] : 0);
#pragma unroll 1
    for (int round = 0; round < runs.rounds; ++round) {
      const int run = runs.Of(warp, round, lane);
      const bool exists = run * runs.length < num_items;
      Base::EmitWord(exists ? *runs.Word(run, 0) : 0, exists && quota > 0 ? *runs.Word(run, 1) : 0, quota, before,
                     [&](int bit, uint32_t place) { emit(run * runs.length + bit, place - first_place, place); });
    }
    if (warp == kThreads / 32 - 1 && lane == 0)
      places = {first_place, before - first_place, range.lowest, range.highest,
                static_cast<float>(range.cut.num - range.cut.left) / static_cast<float>(range.cut.num)};
    if (!range.ranked()) C::Wait();
  }

 private:
  // Items [run length, (run + 1) length) are a run, which one thread looks at.
  struct Runs {
    uint32_t* keys;
    int log_length, length, rounds;  // length: 4, 8, 16 or 32; rounds: runs of a thread
    __device__ __forceinline__ Runs(int num_items, uint32_t* of) : keys(of), log_length(2) {
      while (log_length < 5 && kThreads << log_length < num_items) ++log_length;
      length = 1 << log_length;
      rounds = max((num_items + length * kThreads - 1) / kThreads >> log_length, 1);
    }
    __device__ __forceinline__ int Of(int warp, int round, int lane) const {
      return (warp * rounds + round) * 32 + lane;
    }
    // One of the words that take the place of a run's keys; those of the threads of a warp lie in different banks.
    __device__ __forceinline__ uint32_t* Word(int run, int which) const {
      return keys + (run << log_length) + ((run + which) & (length - 1));
    }
    // Marks in the order of items, of which the first one is item `turn` of the run and has the highest bit.
    __device__ __forceinline__ uint32_t Ordered(uint32_t marks, int turn) const {
      const uint32_t x = __brev(marks) >> (32 - length);
      return turn == 0 ? x : (x << turn | x >> (length - turn)) & (0xffffffffu >> (32 - length));
    }
  };
  struct Marks {
    uint32_t above, equal;  // larger than `highest`; in [lowest, highest]
  };
  static __device__ __forceinline__ Marks Mark(const Runs& runs, int run, int num_items, uint32_t lowest,
                                               uint32_t highest) {
    const int begin = run * runs.length, num = min(num_items - begin, runs.length);
    if (num <= 0) return {0, 0};
    highest = min(highest, 0x7fffffffu);  // so that the sign of a difference says which is larger
    // Four keys at a time, but each thread begins elsewhere: they would all read the same banks.
    const int fours = runs.length / 4, turn = run * fours / 8 & (fours - 1);
    uint32_t above = 0, below = 0;  // marks of the keys so far, the first one highest
#pragma unroll 2
    for (int i = 0; i < fours; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(runs.keys + begin + ((i + turn) & (fours - 1)) * 4);
      const uint32_t four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        above = __funnelshift_l(highest - four[n], above, 1);
        below = __funnelshift_l(four[n] - lowest, below, 1);
      }
    }
    const uint32_t valid = 0xffffffffu >> (32 - num);
    above = runs.Ordered(above, 4 * turn) & valid, below = runs.Ordered(below, 4 * turn) & valid;
    return {above, valid & ~above & ~below};
  }
};

}  // namespace spl::kernels::cuda
