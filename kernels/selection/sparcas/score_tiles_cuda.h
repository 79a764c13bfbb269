// The scores of a block's packed keys, twice: their sums of exponentials, then their weights. Included by
// sparse_stream_cuda.h.
#pragma once

#include "kernels/selection/sparcas/sparse_block_cuda.h"
#include "kernels/selection/sparcas/term_weights_cuda.h"
#include "kernels/selection/sparcas/tile_sums_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

// A warp's part of a stream. Pages: as in PackedTile.
template <int kBlocks, int kThreads, bool kWide, typename Pages>
class TileScorer {
 public:
  using C = Cluster<kBlocks>;
  using Choice = RunChoice<kBlocks, kThreads>;
  static constexpr int kHeads = kWide ? 8 : 4, kWarps = kThreads / 32;
  using SmemT = Smem<kBlocks, kThreads, kHeads, Pages::kDim>;
  using Products = packed_keys::Products<kWide>;
  static constexpr int kLaneHeads = Products::kLaneHeads;
  using Cursor = TileCursor<kWarps>;

  // part: of the block, of positions below choosable. tiles: shared memory for the rings of all warps and then
  // the keys of the part's positions.
  __device__ __forceinline__ TileScorer(const Params& p, SmemT& s, const Part& part, int32_t choosable,
                                        const int32_t* pages, char* barriers, char* tiles)
      : p_(p),
        s_(s),
        part_(part),
        choosable_(choosable),
        warp_(static_cast<int>(threadIdx.x) / 32),
        keys_(reinterpret_cast<uint32_t*>(tiles + kWarps * packed_keys::TileRing::Bytes(p.stages))),
        ring_(barriers + warp_ * packed_keys::TileRing::kBarrierBytes,
              tiles + warp_ * packed_keys::TileRing::Bytes(p.stages), p.stages),
        places_(p, pages, part, warp_) {}

  __device__ __forceinline__ uint32_t* keys() const { return keys_; }
  // Asks for the place of the first tiles.
  __device__ __forceinline__ void Locate() {
    if (places_.num() > 0) places_.Of(0);
  }
  __device__ __forceinline__ void LoadFirst() {
    if (places_.num() == 0) return;
#pragma unroll 1
    for (int n = 0; n < min(ring_.stages(), places_.num()); n += 2) Load(n / 2, n);
  }
  // q [group, head_dim]: of the stream's heads. s.dims must be known. All threads.
  __device__ __forceinline__ void TakeQueries(const unsigned short* q) {
    static_assert(kThreads >= kHeads * kPackedDims);
    if (const int i = static_cast<int>(threadIdx.x); i < kHeads * kPackedDims) {
      const int head = i / kPackedDims;
      const uint32_t bits = head < p_.group ? q[head * Pages::kDim + s_.dims[i % kPackedDims]] : 0;
      s_.queries[i] = __uint_as_float(bits << 16);
    }
    __syncthreads();
    products_.TakeQueries(s_.queries, p_.scale);
  }

  // First pass: maximum and sum of exponentials of each head over each unit, told to all blocks; then over the stream.
  // Returns a cursor behind the warp's last tile. meanwhile() is called once while other blocks are waited for.
  template <typename Meanwhile>
  __device__ __forceinline__ Cursor Score(const Meanwhile& meanwhile) {
    TileSums<kWide> sums;  // over the unit so far
    Cursor at(part_, warp_);
#pragma unroll 1
    for (int n = 0; at.valid(); n += 2) {
      Pair pair;
      const bool two = n + 1 < places_.num();
      const int slot = ring_.Take(two, pair.stages);
      typename Products::Operands queries[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        queries[m] =
            products_.Round(packed_keys::TileWords::Scales(pair.stages[m]), packed_keys::LargestScale(pair.stages[m]));
      Multiply(pair, queries);
      if (const int next = n + ring_.stages(); next < places_.num()) {
        __syncwarp();  // all lanes have read the stages
        Load(slot, next);
        if constexpr (kNoted) {
          Note(at.tile, queries[0]);
          Note(at.next_tile(), queries[1]);
        }
      } else if constexpr (Products::kKept) {
#pragma unroll
        for (int m = 0; m < 2; ++m) products_.Keep(pair.stages[m], pair.x[m]);
      }
      AddPair(sums, at, pair, two);
    }
    C::Arrive();
    meanwhile();
    C::Wait();
    select_tokens::AddUnits<kThreads, kUnits>(p_, part_, s_.units, s_.heads);
    return at;
  }

  // Second pass, backwards: the key of each position's weight, counted by bin. at: behind the warp's last tile.
  // weights: of the stream, or null.
  __device__ __forceinline__ void Weigh(const ChoiceBins& bins, Cursor at, float* weights) {
    float minus[kLaneHeads];  // taken from a head's exponents; a head that does not exist weighs nothing
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const int head = products_.first_head() + h;
      const float2 sums = head < p_.group ? s_.heads[head] : float2{0, 0};
      minus[h] = sums.y > 0 ? sums.x - log2f(sums.y) : INFINITY;
    }
    const int32_t num = places_.num();
    ring_.TurnBack();
#pragma unroll 1
    for (int32_t n = (num - 1) & ~1; n >= 0; n -= 2) {
      Pair pair;
      const bool two = n + 1 < num, resident = n + ring_.stages() >= num;
      const int slot = ring_.TakeBack(two, resident, pair.stages);
      int32_t tiles[2];
      if (two) at.Retreat();
      tiles[1] = at.tile;
      at.Retreat();
      tiles[0] = at.tile;
      if (Products::kKept && resident) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          products_.Units(packed_keys::LargestScale(pair.stages[m]), pair.units[m]);
          products_.TakeKept(pair.stages[m], pair.x[m]);
        }
      } else {
        typename Products::Operands queries[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if constexpr (kNoted) {
            queries[m] = Noted(tiles[m]);
          } else {
            queries[m] = products_.Round(packed_keys::TileWords::Scales(pair.stages[m]),
                                         packed_keys::LargestScale(pair.stages[m]));
          }
        }
        Multiply(pair, queries);
      }
      if (const int32_t next = n - ring_.stages(); next >= 0) {
        if (Products::kKept && resident) FenceProxyAsync();  // the next tile is written in another way than products
        __syncwarp();
        Load(slot, next);
      }
      float of[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m) AddHeads(pair.x[m], pair.units[m], minus, of[m]);
      __syncwarp();  // all lanes have read what was noted there
      if (two) Count(tiles[1], of[1], bins, weights);
      Count(tiles[0], of[0], bins, weights);
    }
  }

 private:
  // Queries are noted, as a tile rounds them, where its weights will be, if they fit there.
  static constexpr bool kNoted = sizeof(typename Products::Operands) * 32 <= kTile * sizeof(uint32_t);
  __device__ __forceinline__ uint2* NotedAt(int32_t tile) const {
    return reinterpret_cast<uint2*>(keys_ + (tile * kTile - part_.begin)) + threadIdx.x % 32;
  }
  __device__ __forceinline__ void Note(int32_t tile, const typename Products::Operands& queries) const {
    *NotedAt(tile) = {queries.q[0], queries.q[1]};
  }
  __device__ __forceinline__ typename Products::Operands Noted(int32_t tile) const {
    const uint2 two = *NotedAt(tile);
    return {{two.x, two.y}};
  }
  // The pair that begins with the n-th tile goes to a slot of the ring.
  __device__ __forceinline__ void Load(int slot, int n) {
    const std::byte* place = places_.Of(n);
    ring_.Load(slot, n, min(places_.num() - n, 2), place, places_.bytes());
  }
  // Products of two tiles at a time, so that there is more to do between two steps that depend on each other.
  struct Pair {
    uint32_t stages[2];
    typename Products::Results x[2];
    float units[2][kLaneHeads];
  };
  __device__ __forceinline__ void Multiply(Pair& pair, const typename Products::Operands (&queries)[2]) const {
    const packed_keys::TileWords tiles[2] = {packed_keys::TileWords(pair.stages[0]),
                                             packed_keys::TileWords(pair.stages[1])};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      products_.Units(tiles[m].largest_scale, pair.units[m]);
      products_.Multiply(tiles[m].keys, queries[m], pair.x[m]);
    }
  }
  // Adds a pair, or the first of it, to the sums of their units, which are told when they end, and goes to the next.
  __device__ __forceinline__ void AddPair(TileSums<kWide>& sums, Cursor& at, Pair& pair, bool two) {
    const int32_t left = choosable_ - at.tile * kTile;
    const bool same = two && !at.last_of_unit();  // unit
    if (left < 2 * kTile) {
      HideFrom(left, pair.x[0]);
      if (same) HideFrom(left - kTile, pair.x[1]);
    }
    if (at.first_of_unit()) sums.CountFrom(pair.x[0], pair.units[0]);
    if (same && sums.AddBoth(pair.x, pair.units)) {
      at.Advance();
    } else {
      sums.Add(pair.x[0], pair.units[0]);
      TellSums(sums, at);
      at.Advance();
      if (!two) return;
      if (!same) {  // the first of a unit
        HideFrom(choosable_ - at.tile * kTile, pair.x[1]);
        sums.CountFrom(pair.x[1], pair.units[1]);
      }
      sums.Add(pair.x[1], pair.units[1]);
    }
    TellSums(sums, at);
    at.Advance();
  }
  // Tells every block the sums of the unit, if the tile is its last one.
  __device__ __forceinline__ void TellSums(TileSums<kWide>& sums, const Cursor& at) {
    if (!at.last_of_unit()) return;
    const int block = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const float2 whole = sums.Take(h);
      const uint64_t both = static_cast<uint64_t>(__float_as_uint(whole.y)) << 32 | __float_as_uint(whole.x);
      const int head = products_.first_head() + h;
      if (head < p_.group && block < kBlocks)
        C::Store(reinterpret_cast<uint64_t*>(&s_.units[head * kUnits + at.unit]), block, both);
    }
  }
  __device__ __forceinline__ void HideFrom(int32_t left, typename Products::Results& x) const {
    if (left >= kTile) return;
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

  // The weights of a tile at two rows of one part: lanes c and c ^ 1, then c and c ^ 2, share their parts.
  __device__ __forceinline__ void AddHeads(const typename Products::Results& x, const float (&units)[kLaneHeads],
                                           const float (&minus)[kLaneHeads], float (&of)[2]) const {
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

  // Keeps the keys of these weights, and counts them.
  __device__ __forceinline__ void Count(int32_t tile, const float (&of)[2], const ChoiceBins& bins, float* weights) {
    const int c = static_cast<int>(threadIdx.x) % 4;
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
  }

  const Params& p_;
  SmemT& s_;
  const Part part_;
  const int32_t choosable_;
  const int warp_;
  uint32_t* const keys_;
  packed_keys::TileRing ring_;
  TilePlaces<kWarps, Pages> places_;
  Products products_;
};

}  // namespace spl::kernels::cuda::sparse_attention
