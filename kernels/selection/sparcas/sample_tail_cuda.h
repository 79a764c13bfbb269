// The part of a stream's scores that its list leaves out, head by head, by a sample of its tiles: the mass of
// sparse_attention.h. Included by sparse_stream_cuda.h.
#pragma once

#include "kernels/selection/sparcas/sparse_block_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

// Tiles first, first + step, .. of the sample, by one warp. The shares go to left_out of block 0. Kept apart from the
// code of every step, so that it does not cost that code registers. Weights have the bits that the choice knew.
template <int kBlocks, bool kWide, typename Pages, typename SmemT>
__device__ __noinline__ void SampleTail(const Params& p, SmemT& s, const int32_t* pages, int32_t choosable, int first,
                                        int step) {
  using Products = packed_keys::Products<kWide>;
  constexpr int kLaneHeads = Products::kLaneHeads;
  const PackedSample sample{(choosable + kTile - 1) / kTile};
  if (first >= sample.num()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  struct Words {  // a lane's of a tile
    uint4 keys[2], scales;
    float largest;
  };
  const auto load = [&](int i) {
    const std::byte* const place = PackedTile<Pages>(p, pages, sample.tile(i));
    const auto words = [&](int at) { return __ldcg(reinterpret_cast<const uint4*>(place + at)); };
    return Words{{words(lane * 16), words(512 + lane * 16)},
                 words(kPackedScalesAt + lane % 4 * 16),
                 __ldcg(reinterpret_cast<const float*>(place + kPackedLargestAt))};
  };
  Words next = load(first);
  Products products;
  products.TakeQueries(s.queries, p.scale);
  float minus[kLaneHeads];  // as in TileScorer::Weigh
#pragma unroll
  for (int h = 0; h < kLaneHeads; ++h) {
    const int head = products.first_head() + h;
    const float2 sums = head < p.group ? s.heads[head] : float2{0, 0};
    minus[h] = sums.y > 0 ? sums.x - log2f(sums.y) : INFINITY;
  }
  const float lowest = __uint_as_float(s.picked.lowest), highest = __uint_as_float(min(s.picked.highest, 0x7f800000u)),
              rest = s.picked.rest;
#pragma unroll 1
  for (int i = first; i < sample.num(); i += step) {
    const int32_t tile = sample.tile(i);
    const Words words = next;
    if (i + step < sample.num()) next = load(i + step);
    typename Products::Results x;
    float units[kLaneHeads], left_out[kLaneHeads] = {};
    products.Units(words.largest, units);
    products.Multiply(words.keys, products.Round(words.scales, words.largest), x);
#pragma unroll
    for (int m = 0; m < Products::kParts; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float terms[kLaneHeads];
#pragma unroll
        for (int h = 0; h < kLaneHeads; ++h) terms[h] = Exp2(fmaf(x[m][r][h], units[h], -minus[h]));
        float weight = kLaneHeads == 2 ? terms[0] + terms[kLaneHeads - 1] : terms[0];
        weight += __shfl_xor_sync(0xffffffffu, weight, 1);
        weight += __shfl_xor_sync(0xffffffffu, weight, 2);
        const bool exists = tile * kTile + products.Position(m, r) < choosable;
        const float part = !exists ? 0.0f : weight < lowest ? 1.0f : weight <= highest ? rest : 0.0f;
#pragma unroll
        for (int h = 0; h < kLaneHeads; ++h) left_out[h] += part > 0 ? part * terms[h] : 0.0f;
      }
    }
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) left_out[h] += __shfl_xor_sync(0xffffffffu, left_out[h], offset);
      const int head = products.first_head() + h;
      if (lane < 4 && head < p.group)
        Cluster<kBlocks>::Store(reinterpret_cast<uint32_t*>(&s.left_out[i][head]), 0, __float_as_uint(left_out[h]));
    }
  }
}

// Behind the cluster's last barrier, by one warp of block 0: the mass. Sums are in an order that does not follow from
// kBlocks, or count from powers of two.
template <int kBlocks, int kHeads, typename SmemT>
__device__ __forceinline__ void WriteKeptMass(const Params& p, const SmemT& s, int32_t choosable, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const PackedSample sample{(choosable + kTile - 1) / kTile};
  float of_heads[kHeads], mine = 0;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) of_heads[h] = h < p.group && lane < sample.num() ? s.left_out[lane][h] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) of_heads[h] += __shfl_xor_sync(0xffffffffu, of_heads[h], offset);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) mine = h == lane ? of_heads[h] : mine;
  float kept = 1;
  if (lane < p.group) {
    float max = s.theirs.of_block[0][lane].x;
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) max = fmaxf(max, s.theirs.of_block[b][lane].x);
    const float listed = listed_rows::TreeSum<kBlocks>(
        [&](int b) { return s.theirs.exact[b][lane] * Exp2(s.theirs.of_block[b][lane].x - max); });
    const float2 scored = s.heads[lane];  // sum of exponentials 2^x / y
    const float above = scored.x - log2f(scored.y) - max - log2f(listed);
    kept = 1 / (1 + fminf(mine * sample.scale(choosable), 1.0f) * Exp2(fminf(above, 126.0f)));
  }
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) kept = fminf(kept, __shfl_xor_sync(0xffffffffu, kept, offset));
  if (lane == 0) *to = kept;
}

}  // namespace spl::kernels::cuda::sparse_attention
