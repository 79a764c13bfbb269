// Step (c) of select_tokens.h on a device, first half: the terms 2^(score - maximum of the tile) of a block's tiles,
// and the maximum and the sum of each tile. A warp takes every kWarps-th tile from the last one down, which is the one
// that changes.
//
// By mma m16n8k16, 16 positions against 8 query heads over 16 dimensions. A lane loads 16 bytes of a dimension's row, 8
// positions, and pairs the positions 2m and 2m + 1 of its four dimensions for the m-th product: rows of an mma may be
// any positions as long as its results are taken to be theirs, so nothing goes through shared memory before. Other
// shapes and types are scored by plain loops.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/selection/sparcas/compact_gather_cuda.h"

namespace spl::kernels::cuda::select_tokens {

// The products of a warp by mma. kTiles: tiles whose keys are in registers or on their way; kHeads: query heads of the
// stream, at most. Kv: see key_rows_cuda.h; compact keys are bf16.
template <int kWarps, int kTiles, int kHeads, typename Kv>
class MmaTerms {
 public:
  __device__ __forceinline__ MmaTerms(const Params& p, const Part& part, const CompactStream<Kv>& compact)
      : p_(p),
        part_(part),
        compact_(compact),
        warp_(static_cast<int>(threadIdx.x) / 32),
        g_(static_cast<int>(threadIdx.x) % 32 / 4),
        c_(static_cast<int>(threadIdx.x) % 4) {}

  // Starts to load the first kTiles tiles.
  __device__ __forceinline__ void LoadFirst() {
    ForEachInFlight([&](auto i) {
      if (TileOf(i) >= part_.first_tile) Load(i, TileOf(i));
    });
  }
  __device__ __forceinline__ void TakeDims(const int32_t* dims) {
#pragma unroll
    for (int d = 0; d < 4; ++d) dims_[d] = dims[SlotOf(d)];
  }
  // The queries' values in these dimensions.
  template <typename Q>
  __device__ __forceinline__ void TakeQueries(const Q* q) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool exists = 8 * h + g_ < p_.group;
      const auto* row = reinterpret_cast<const unsigned short*>(q) + (exists ? 8 * h + g_ : 0) * p_.head_dim;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t pair = row[dims_[2 * k]] | static_cast<uint32_t>(row[dims_[2 * k + 1]]) << 16;
        q_[h][k] = exists ? pair : 0;
      }
    }
  }
  // Appends positions [gathered, kv_len) to the last tile, whose keys LoadFirst has asked for: to the compact keys and
  // to this warp's registers. page: the last tile's. REQUIRES: this warp has the stream's last tile.
  template <bool kListed>
  __device__ __forceinline__ void Append(int32_t gathered, int32_t page, const int32_t* table, const Candidates& own,
                                         bool listed) {
    static_assert(std::is_same_v<CompactType<Kv>, __nv_bfloat16>);
    const int32_t tile = part_.num_tiles - 1;
    auto* to = reinterpret_cast<__nv_bfloat16*>(p_.batch.pool.base) + compact_.At(tile);
    const Kv* keys = KeysOf<Kv>(p_.batch.pool.base, page, p_.head_dim);
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // this lane's positions
      const int slot = 8 * g_ + n;
      if (tile * kTile + slot < gathered || tile * kTile + slot >= part_.kv_len) continue;
      const KeyRow<Kv> key =
          listed ? KeyOf<Kv, kListed>(p_, table, own, tile * kTile + slot) : KeyRow<Kv>(keys, slot, p_.head_dim);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const __nv_bfloat16 element = key[dims_[d]];
        to[SlotOf(d) * kTile + slot] = element;
        const uint32_t value = __bfloat16_as_ushort(element);
        uint32_t& word = keys_[0][d][n / 2];
        word = n % 2 == 0 ? (word & 0xffff0000u) | value : (word & 0xffffu) | value << 16;
      }
    }
  }
  // All tiles of the warp, kTiles at a time; each loads the one that follows it.
  template <typename StorageT>
  __device__ __forceinline__ void Score(const StorageT& storage) {
    for (int from = 0; TileOf(from) >= part_.first_tile; from += kTiles) {
      ForEachInFlight([&](auto i) { ScoreTile(i, from, storage); });
    }
  }

 private:
  // An mma has 8 query heads; of 4 each lane takes one, of 8 two.
  static constexpr int kHeadTiles = (kHeads + 7) / 8, kPerLane = kHeads == 4 ? 1 : 2;

  // The index is a type, so that keys stay in registers.
  template <typename Body>
  static __device__ __forceinline__ void ForEachInFlight(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) { (body(std::integral_constant<int, i>{}), ...); }
    (std::make_integer_sequence<int, kTiles>{});
  }
  __device__ __forceinline__ int32_t TileOf(int i) const { return part_.end_tile - 1 - warp_ - i * kWarps; }
  __device__ __forceinline__ int SlotOf(int d) const { return 2 * c_ + (d & 1) + (d & 2) * 4; }

  template <typename I>
  __device__ __forceinline__ void Load(I i, int32_t tile) {
    const uint4* from =
        reinterpret_cast<const uint4*>(reinterpret_cast<const __nv_bfloat16*>(p_.batch.pool.base) + compact_.At(tile));
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const uint4 x = from[SlotOf(d) * 8 + g_];
      keys_[i][d][0] = x.x, keys_[i][d][1] = x.y, keys_[i][d][2] = x.z, keys_[i][d][3] = x.w;
    }
  }

  template <typename I, typename StorageT>
  __device__ __forceinline__ void ScoreTile(I i, int from, const StorageT& storage) {
    const int32_t tile = TileOf(from + i);
    if (tile < part_.first_tile) return;
    float2* sums = storage.sums(tile - part_.first_tile);
    float* terms = storage.tile(tile - part_.first_tile);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      float x[2][8];  // products of positions 8 g + n and query heads 8 h + 2 c + k
      Multiply(i, h, x);
      const int32_t next = TileOf(from + i + kTiles);
      if (h == kHeadTiles - 1 && next >= part_.first_tile) Load(i, next);
      if constexpr (kPerLane == 1) {  // the second head of lanes 0 and 1 of a quad goes to lanes 2 and 3
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float other = __shfl_xor_sync(0xffffffffu, x[1][n], 2);
          x[0][n] = c_ < 2 ? x[0][n] : other;
        }
      }
#pragma unroll
      for (int k = 0; k < kPerLane; ++k)
        StoreTerms(tile, kPerLane == 1 ? 2 * (c_ & 1) + (c_ >> 1) : 8 * h + 2 * c_ + k, x[k], sums, terms);
    }
  }

  template <typename I>
  __device__ __forceinline__ void Multiply(I i, int h, float (&x)[2][8]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t a[4] = {
          __byte_perm(keys_[i][0][m], keys_[i][1][m], 0x5410), __byte_perm(keys_[i][0][m], keys_[i][1][m], 0x7632),
          __byte_perm(keys_[i][2][m], keys_[i][3][m], 0x5410), __byte_perm(keys_[i][2][m], keys_[i][3][m], 0x7632)};
      float r[4] = {};
      Mma16816(r, a, q_[h][0], q_[h][1]);
      x[0][2 * m] = r[0], x[1][2 * m] = r[1], x[0][2 * m + 1] = r[2], x[1][2 * m + 1] = r[3];
    }
  }

  // x: this lane's products of query head `head`; the lanes of a row of the mma have the others of the tile.
  __device__ __forceinline__ void StoreTerms(int32_t tile, int head, float (&x)[8], float2* sums, float* terms) {
    const int32_t left = part_.kv_len - tile * kTile - 8 * g_;  // how many positions are left for this lane
    float max = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n] = n < left ? x[n] * p_.scale : -INFINITY;
      max = fmaxf(max, x[n]);
    }
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
    const bool exists = head < p_.group;
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0;
    if (exists) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sum += x[n] = Exp2(x[n] - base);
      // The halves in an order that keeps the lanes of a quad in different banks.
      float4* to = reinterpret_cast<float4*>(terms + head * kTile + ((8 * g_) ^ TermSwizzle<kHeads>(head)));
      const bool swap = kPerLane == 1 ? c_ & 2 : c_ & 1;
      const float4 low{x[0], x[1], x[2], x[3]}, high{x[4], x[5], x[6], x[7]};
      to[swap ? 1 : 0] = swap ? high : low;
      to[swap ? 0 : 1] = swap ? low : high;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    if (exists && g_ == 0) sums[head] = float2{max, sum};
  }

  const Params& p_;
  const Part& part_;
  const CompactStream<Kv>& compact_;
  const int warp_, g_, c_;
  uint32_t keys_[kTiles][4][4];  // keys of this lane's dimension and word
  int32_t dims_[4];              // this lane's dimensions,
  uint32_t q_[kHeadTiles][2];    // and its query heads' values in them
};

// A lane's exponentials of one tile and query head: the maximum and the sum of all 64.
template <typename Score>
__device__ __forceinline__ float2 StorePlainTerms(float* terms, const Score& score_of) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[2];
  float max = -INFINITY;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    x[k] = score_of(lane + 32 * k);
    max = fmaxf(max, x[k]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
  const float base = max == -INFINITY ? 0.0f : max;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 2; ++k) sum += terms[lane + 32 * k] = Exp2(x[k] - base);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return float2{max, sum};
}

// The same for every shape and type. dims: of the step.
template <int kWarps, typename Q, typename Kv, typename StorageT>
__device__ __forceinline__ void ScorePlainly(const Params& p, const Part& part, const CompactStream<Kv>& compact,
                                             const Q* q, const int32_t* dims, const StorageT& storage) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int32_t tile = part.end_tile - 1 - warp; tile >= part.first_tile; tile -= kWarps) {
    const auto* keys = reinterpret_cast<const CompactType<Kv>*>(p.batch.pool.base) + compact.At(tile);
    for (int h = 0; h < p.group; ++h) {
      const float2 sums = StorePlainTerms(storage.tile(tile - part.first_tile) + h * kTile, [&](int slot) {
        if (tile * kTile + slot >= part.kv_len) return -INFINITY;
        float dot = 0;
        for (int i = 0; i < p.num_dims; ++i)
          dot = fmaf(ToF(q[h * p.head_dim + dims[i]]), ToF(keys[i * kTile + slot]), dot);
        return dot * p.scale;
      });
      if (lane == 0) storage.sums(tile - part.first_tile)[h] = sums;
    }
  }
}

}  // namespace spl::kernels::cuda::select_tokens
