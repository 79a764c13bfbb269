// The scores of a stream's packed keys, twice: their sums of exponentials, then their weights. The members of
// StreamStep that make them.
#pragma once

#include "kernels/selection/sparcas/sparse_stream_cuda.h"
#include "kernels/selection/sparcas/term_weights_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::Score() -> Cursor {
  RunningSum sums[kLaneHeads][kSums];  // this lane's, over the unit so far
  Cursor at(part_, warp_);
#pragma unroll 1
  for (int n = 0; at.valid(); n += 2) {
    Pair pair;
    const bool two = n + 1 < places_.num();
    pair.stages[0] = ring_.Take();
    pair.stages[1] = two ? ring_.Take() : pair.stages[0];
    Multiply(pair);
    if (n + ring_.stages() < places_.num()) {
      const int next = n + ring_.stages();
      __syncwarp();  // all lanes have read the stages
      ring_.Load(next, min(places_.num() - next, 2), places_.Of(next));
    } else if constexpr (Products::kKept) {
      for (int m = 0; m < 2; ++m) products_.Keep(pair.stages[m], pair.x[m]);
    }
    AddTile(sums, at, pair, 0);
    if (two) AddTile(sums, at, pair, 1);
  }
  C::Sync();
  select_tokens::AddUnits<kThreads, kUnits>(p_, part_, s_.units, s_.heads);
  return at;
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::Multiply(Pair& pair) const -> void {
  const packed_keys::TileWords tiles[2] = {packed_keys::TileWords(pair.stages[0]),
                                           packed_keys::TileWords(pair.stages[1])};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    products_.Units(tiles[m].largest_scale, pair.units[m]);
    products_.Multiply(tiles[m], pair.x[m]);
  }
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::AddTile(
    RunningSum (&sums)[kLaneHeads][kSums], Cursor& at, Pair& pair, int m) -> void {
  const int32_t left = choosable_ - at.tile * kTile;
  if (left < kTile) HideFrom(left, pair.x[m]);
  AddScores(sums, pair.x[m], pair.units[m], at.first_of_unit());
  if (at.last_of_unit()) {
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      TellUnit(at.unit, products_.first_head() + h, sums[h]);
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums[h][n] = RunningSum();
    }
  }
  at.Advance();
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::AddScores(
    RunningSum (&sums)[kLaneHeads][kSums], const typename Products::Results& x, const float (&units)[kLaneHeads],
    bool first) const -> void {
#pragma unroll
  for (int h = 0; h < kLaneHeads; ++h) {
    float more[kSums];
    bool raise = first;
    if (!first) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        more[n] = SumOf(sums[h][n], x, n, h, units[h]);
        raise |= !(more[n] < kLargest);
      }
      // Larger than what a sum counts from by more than a float holds: once in a while.
      raise = Raises(raise);
    }
    if (raise) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) more[n] = Raise(sums[h][n], x, n, h, units[h]);
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n) sums[h][n].sum += more[n];
  }
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::Raises(bool own) -> bool {
  const uint32_t all = __ballot_sync(0xffffffffu, own);
  if (kWide || all == 0) return all != 0;
  return (all & (threadIdx.x % 2 == 0 ? 0x55555555u : 0xaaaaaaaau)) != 0;
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::SumOf(const RunningSum& to,
                                                                                   const typename Products::Results& x,
                                                                                   int n, int h, float unit) const
    -> float {
  float sum[2] = {};
#pragma unroll
  for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += Exp2(fmaf(x[m][r][h], unit, -to.base));
  }
  return sum[0] + sum[1];
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::Raise(RunningSum& to,
                                                                                   const typename Products::Results& x,
                                                                                   int n, int h, float unit) const
    -> float {
  float base = to.base;
#pragma unroll
  for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
    for (int r = 0; r < 2; ++r) base = fmaxf(base, x[m][r][h] * unit);
  }
  to.sum *= Exp2(to.base - base);
  to.base = base;
  return SumOf(to, x, n, h, unit);
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::HideFrom(
    int32_t left, typename Products::Results& x) const -> void {
#pragma unroll
  for (int m = 0; m < Products::kParts; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (products_.Position(m, r) < left) continue;
#pragma unroll
      for (int h = 0; h < kLaneHeads; ++h) x[m][r][h] = -INFINITY;
    }
  }
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::TellUnit(int32_t unit, int head,
                                                                                      const RunningSum (&own)[kSums])
    -> void {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float max = fmaxf(own[0].base, own[kSums - 1].base);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
  float sum = __fmul_rn(own[0].sum, Exp2(own[0].base - max));
  if constexpr (kSums == 2) sum = __fadd_rn(sum, __fmul_rn(own[1].sum, Exp2(own[1].base - max)));
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const uint64_t both = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(max);
  if (head < p_.group && lane / 4 < kBlocks)
    C::Store(reinterpret_cast<uint64_t*>(&s_.units[head * kUnits + unit]), lane / 4, both);
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::Weigh(const ChoiceBins& bins, Cursor at)
    -> void {
  const int c = static_cast<int>(threadIdx.x) % 4;
  float minus[kLaneHeads];  // taken from a head's exponents; a head that does not exist weighs nothing
#pragma unroll
  for (int h = 0; h < kLaneHeads; ++h) {
    const int head = products_.first_head() + h;
    const float2 sums = head < p_.group ? s_.heads[head] : float2{0, 0};
    minus[h] = sums.y > 0 ? sums.x - log2f(sums.y) : INFINITY;
  }
  float* const weights = p_.weights == nullptr ? nullptr : p_.weights + stream_ * p_.weights_stride;
  const auto keep = [&](int32_t tile, const float(&of)[2]) {
    const int32_t first = tile * kTile + products_.Position((c & 1) * 2 + (c >> 1), 0);
    uint32_t keys[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      keys[r] = __float_as_uint(fmaxf(of[r], 0.0f));  // WeightKey
      keys_[first - part_.begin + 8 * r] = keys[r];
    }
    if (weights == nullptr && (tile + 1) * kTile <= choosable_) {  // as nearly always
#pragma unroll
      for (int r = 0; r < 2; ++r) Choice::Count(s_.choice, bins, keys[r]);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + 8 * r >= choosable_) continue;
      if (weights != nullptr) weights[first + 8 * r] = of[r];
      Choice::Count(s_.choice, bins, keys[r]);
    }
  };
  const int32_t num = places_.num();
  ring_.TurnBack(num);
#pragma unroll 1
  for (int32_t n = (num - 1) & ~1; n >= 0; n -= 2) {
    Pair pair;
    const bool two = n + 1 < num;
    if (two) pair.stages[1] = ring_.TakeBack();
    pair.stages[0] = ring_.TakeBack();
    if (!two) pair.stages[1] = pair.stages[0];
    const int32_t next = n + (two ? 1 : 0) - ring_.stages();
    if (Products::kKept && n + ring_.stages() >= num) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        products_.Units(packed_keys::LargestScale(pair.stages[m]), pair.units[m]);
        products_.TakeKept(pair.stages[m], pair.x[m]);
      }
      if (next >= 0) FenceProxyAsync();  // the products were written in another way than the next tile is
    } else {
      Multiply(pair);
    }
    if (next >= 0) {
      __syncwarp();
      ring_.LoadBack(next, two ? 2 : 1, places_.Of(next));
    }
    float of[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) AddHeads(pair.x[m], pair.units[m], minus, of[m]);
    if (two) {
      at.Retreat();
      keep(at.tile, of[1]);
    }
    at.Retreat();
    keep(at.tile, of[0]);
  }
}

template <int kBlocks, int kThreads, bool kWide, typename Pages>
__device__ __forceinline__ auto StreamStep<kBlocks, kThreads, kWide, Pages>::AddHeads(
    const typename Products::Results& x, const float (&units)[kLaneHeads], const float (&minus)[kLaneHeads],
    float (&of)[2]) const -> void {
  const int c = static_cast<int>(threadIdx.x) % 4;
  float sums[Products::kParts][2];  // over this lane's heads
#pragma unroll
  for (int m = 0; m < Products::kParts; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[m][r] = Exp2(fmaf(x[m][r][0], units[0], -minus[0]));
      if constexpr (kWide) sums[m][r] += Exp2(fmaf(x[m][r][1], units[1], -minus[1]));
    }
  }
  float half[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = __shfl_xor_sync(0xffffffffu, c & 1 ? sums[m][r] : sums[m + 2][r], 1);
      half[m][r] = (c & 1 ? sums[m + 2][r] : sums[m][r]) + other;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float other = __shfl_xor_sync(0xffffffffu, c & 2 ? half[0][r] : half[1][r], 2);
    of[r] = (c & 2 ? half[1][r] : half[0][r]) + other;
  }
}

}  // namespace spl::kernels::cuda::sparse_attention
