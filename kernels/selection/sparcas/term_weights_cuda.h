// Step (c) of select_tokens.h on a device, second half: the terms of all tiles become weights. The sums of exponentials
// are taken over units of tiles, in an order that follows from kv_len alone: clusters of different sizes make the same
// bits.
#pragma once

#include "kernels/selection/sparcas/select_block_cuda.h"

namespace spl::kernels::cuda::select_tokens {

// Maximum and sum of exponentials of this block's units, told to every block of the cluster. All threads; returns when
// all blocks have told theirs.
template <int kBlocks, int kThreads, typename StorageT>
__device__ __forceinline__ void ShareUnits(const Params& p, const Part& part, const StorageT& storage) {
  using C = Cluster<kBlocks>;
  const int t = threadIdx.x;
  C::Wait();
  constexpr int kTogether = 8;  // lanes of a unit and head
  const int num_sums = (part.end_unit - part.first_unit) * p.group;
#pragma unroll 1
  for (int first_sum = 0; first_sum < num_sums; first_sum += kThreads / kTogether) {
    const int i = first_sum + t / kTogether;
    const int unit = part.first_unit + min(i, num_sums - 1) / p.group, h = i % p.group;
    const int32_t to = min((unit + 1) * part.unit_tiles, part.num_tiles);
    float max = -INFINITY, sum = 0;
    for (int32_t tile = unit * part.unit_tiles + t % kTogether; tile < to; tile += kTogether) {
      const float2 x = storage.sums(tile - part.first_tile)[h];
      const float next = fmaxf(max, x.x);
      sum = next == -INFINITY ? 0 : sum * Exp2(max - next) + x.y * Exp2(x.x - next);
      max = next;
    }
    float most = max;
#pragma unroll
    for (int offset = kTogether / 2; offset > 0; offset /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    sum = most == -INFINITY ? 0 : sum * Exp2(max - most);
#pragma unroll
    for (int offset = kTogether / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const uint64_t both = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(most);
    if (i >= num_sums) continue;
#pragma unroll 1
    for (int block = t % kTogether; block < kBlocks; block += kTogether)
      C::Store(reinterpret_cast<uint64_t*>(&storage.units[h * kUnits + unit]), block, both);
  }
  C::Sync();
}

// heads: maximum of each query head's scores and 1 / sum of its exponentials, from the units. All threads.
template <int kThreads, int kMostUnits = kUnits, typename ParamsT>
__device__ __forceinline__ void AddUnits(const ParamsT& p, const Part& part, const float2* units, float2* heads) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int h = warp; h < p.group; h += kThreads / 32) {
    float max = -INFINITY, sum = 0;
    float2 mine[kMostUnits / 32];
#pragma unroll
    for (int i = 0; i < kMostUnits / 32; ++i) {
      const int unit = 32 * i + lane;
      mine[i] = unit < part.num_units ? units[h * kMostUnits + unit] : float2{-INFINITY, 0};
      max = fmaxf(max, mine[i].x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    if (max > -INFINITY) {
#pragma unroll
      for (int i = 0; i < kMostUnits / 32; ++i) sum += mine[i].y * Exp2(mine[i].x - max);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) heads[h] = float2{max, sum > 0 ? 1.0f / sum : 0.0f};
  }
  __syncthreads();
}

// The weights of this block's positions; in the place of the first head's terms come the keys by which each is chosen,
// which are counted by bin. first_recent: positions from there on are chosen whatever they weigh. All threads.
template <typename Choice, int kThreads, int kHeads, typename SmemT, typename StorageT>
__device__ __forceinline__ void Weigh(const Params& p, const Part& part, SmemT& s, const StorageT& storage,
                                      const ChoiceBins& bins, int32_t first_recent, float* weights) {
  constexpr int kHalf = 16;  // lanes of a tile, four positions each
  const int t = threadIdx.x, lane = t % 32;
  for (int32_t i = t / kHalf; i < part.end_tile - part.first_tile; i += kThreads / kHalf) {
    const int slot = lane % kHalf * 4;
    const int32_t j = (part.first_tile + i) * kTile + slot;
    float* terms = storage.tile(i) + slot;
    const float2* sums = storage.sums(i);
    float w[4] = {};
    const auto add = [&](int h) {
      const float2 head = s.heads[h];
      const float factor = Exp2(sums[h].x - head.x) * head.y;
      const float4 x = *reinterpret_cast<const float4*>(terms + h * kTile + ((slot ^ TermSwizzle<kHeads>(h)) - slot));
      w[0] = fmaf(x.x, factor, w[0]);
      w[1] = fmaf(x.y, factor, w[1]);
      w[2] = fmaf(x.z, factor, w[2]);
      w[3] = fmaf(x.w, factor, w[3]);
    };
    if (kHeads == 4 && p.group == 4) {
#pragma unroll
      for (int h = 0; h < 4; ++h) add(h);
    } else {
#pragma unroll 1
      for (int h = 0; h < p.group; ++h) add(h);
    }
    uint32_t key[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      key[n] = j + n >= first_recent ? kForcedKey : WeightKey(w[n]);
      if (j + n >= part.end) continue;
      if (weights != nullptr) weights[j + n] = w[n];
      Choice::Count(s.choice, bins, key[n]);
    }
    *reinterpret_cast<uint4*>(terms) = uint4{key[0], key[1], key[2], key[3]};
  }
}

}  // namespace spl::kernels::cuda::select_tokens
