// A warp's sums of exponentials over a unit of tiles, as the lanes have them. Included by score_tiles_cuda.h.
#pragma once

#include "kernels/selection/sparcas/sparse_block_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

template <bool kWide>
class TileSums {
 public:
  using Products = packed_keys::Products<kWide>;
  using Results = typename Products::Results;
  static constexpr int kLaneHeads = Products::kLaneHeads;

  // Sums that have nothing yet count from the largest score of a tile.
  __device__ __forceinline__ void CountFrom(const Results& x, const float (&units)[kLaneHeads]) {
    __syncwarp();  // keeps this a branch: predicates would cost every tile as much
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums_[h][n].base = Largest(sums_[h][n].base, x, n, h, units[h]);
    }
  }
  // Adds two tiles. False, and nothing has been added, if a sum would have to count from a larger score for one of
  // them.
  __device__ __forceinline__ bool AddBoth(const Results (&x)[2], const float (&units)[2][kLaneHeads]) {
    float more[2][kLaneHeads][kSums];
    bool raise = false;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          more[m][h][n] = SumOf(sums_[h][n].base, x[m], n, h, units[m][h]);
          raise |= !(more[m][h][n] < kLargest);
        }
      }
    }
    if (__any_sync(0xffffffffu, raise)) return false;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums_[h][n].sum = (sums_[h][n].sum + more[0][h][n]) + more[1][h][n];
    }
    return true;
  }
  __device__ __forceinline__ void Add(const Results& x, const float (&units)[kLaneHeads]) {
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      float more[kSums];
      bool raise = false;
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        more[n] = SumOf(sums_[h][n].base, x, n, h, units[h]);
        raise |= !(more[n] < kLargest);
      }
      // Larger than what a sum counts from by more than a float holds: once in a while.
      if (Raises(raise)) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) more[n] = Raise(sums_[h][n], x, n, h, units[h]);
      }
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums_[h][n].sum += more[n];
    }
  }
  // Maximum and sum of a head's exponentials over all lanes that have it. The head's sums have nothing then.
  __device__ __forceinline__ float2 Take(int h) {
    RunningSum(&own)[kSums] = sums_[h];
    float max = fmaxf(own[0].base, own[kSums - 1].base);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    float sum = __fmul_rn(own[0].sum, Exp2(own[0].base - max));
    if constexpr (kSums == 2) sum = __fadd_rn(sum, __fmul_rn(own[1].sum, Exp2(own[1].base - max)));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
#pragma unroll
    for (int n = 0; n < kSums; ++n) own[n] = RunningSum();
    return {max, sum};
  }

 private:
  static constexpr int kSums = kWide ? 1 : 2;  // sums of a lane and head
  // Counted from `base`.
  struct RunningSum {
    float base = kLowest, sum = 0;
  };

  // Without kWide lanes are raised together whose heads are all even or all odd.
  static __device__ __forceinline__ bool Raises(bool own) {
    const uint32_t all = __ballot_sync(0xffffffffu, own);
    if (kWide || all == 0) return all != 0;
    return (all & (threadIdx.x % 2 == 0 ? 0x55555555u : 0xaaaaaaaau)) != 0;
  }
  // Sum n of the exponentials of a head's scores, counted from `base`.
  static __device__ __forceinline__ float SumOf(float base, const Results& x, int n, int h, float unit) {
    float sum[2];
#pragma unroll
    for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float term = Exp2(fmaf(x[m][r][h], unit, -base));
        sum[r] = m == n ? term : sum[r] + term;
      }
    }
    return sum[0] + sum[1];
  }
  // The largest of those scores and `than`.
  static __device__ __forceinline__ float Largest(float than, const Results& x, int n, int h, float unit) {
#pragma unroll
    for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) than = fmaxf(than, x[m][r][h] * unit);
    }
    return than;
  }
  // The same sum once `to` counts from the largest of these scores, if that is larger than what it counted from.
  static __device__ __forceinline__ float Raise(RunningSum& to, const Results& x, int n, int h, float unit) {
    const float base = Largest(to.base, x, n, h, unit);
    to.sum *= Exp2(to.base - base);
    to.base = base;
    return SumOf(base, x, n, h, unit);
  }

  RunningSum sums_[kLaneHeads][kSums];
};

}  // namespace spl::kernels::cuda::sparse_attention
