// The scores of a block's packed keys, twice: their sums of exponentials, then their weights. Included by
// sparse_stream_cuda.h.
#pragma once

#include "kernels/selection/sparcas/sparse_block_cuda.h"
#include "kernels/selection/sparcas/term_weights_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

// A lane's sum of the exponentials of a head's scores, counted from `base`.
struct RunningSum {
  float base = kLowest, sum = 0;
};

// A warp's part of a stream. Pages: as in PackedTile.
template <int kBlocks, int kThreads, bool kWide, typename Pages>
class TileScorer {
 public:
  using C = Cluster<kBlocks>;
  using Choice = RunChoice<kBlocks, kThreads>;
  static constexpr int kWarps = kThreads / 32;
  using SmemT = Smem<kBlocks, kThreads, kWide ? 8 : 4, Pages::kDim>;
  using Products = packed_keys::Products<kWide>;
  static constexpr int kLaneHeads = Products::kLaneHeads, kSums = kWide ? 1 : 2;  // sums of a lane and head
  using Cursor = TileCursor<kWarps>;

  // part: of the block, of positions below choosable. tiles: shared memory for the rings of all warps and then
  // the keys of the part's positions.
  __device__ __forceinline__ TileScorer(const Params& p, SmemT& s, const Part& part, int32_t choosable,
                                        const int32_t* pages, char* tiles)
      : p_(p),
        s_(s),
        part_(part),
        choosable_(choosable),
        warp_(static_cast<int>(threadIdx.x) / 32),
        keys_(reinterpret_cast<uint32_t*>(tiles + kWarps * packed_keys::TileRing::Bytes(p.stages))),
        ring_(tiles + warp_ * packed_keys::TileRing::Bytes(p.stages), p.stages),
        places_(p, pages, part, warp_) {}

  __device__ __forceinline__ uint32_t* keys() const { return keys_; }
  // Asks for the place of the first tiles.
  __device__ __forceinline__ void Locate() {
    if (places_.num() > 0) places_.Of(0);
  }
  __device__ __forceinline__ void LoadFirst() {
    if (places_.num() == 0) return;
#pragma unroll 1
    for (int n = 0; n < ring_.stages(); n += 2) ring_.Load(n, min(max(places_.num() - n, 0), 2), places_.Of(n));
  }
  // q: of the stream's heads. s.dims must be known.
  __device__ __forceinline__ void TakeQueries(const unsigned short* q) {
    products_.TakeQueries(q, s_.dims, p_.group, Pages::kDim, p_.scale);
  }

  // First pass: maximum and sum of exponentials of each head over each unit, told to all blocks; then over the stream.
  // Returns a cursor behind the warp's last tile.
  __device__ __forceinline__ Cursor Score() {
    RunningSum sums[kLaneHeads][kSums];  // this lane's, over the unit so far
    Cursor at(part_, warp_);
#pragma unroll 1
    for (int n = 0; at.valid(); n += 2) {
      Pair pair;
      const bool two = n + 1 < places_.num();
      ring_.Take(two ? 2 : 1, pair.stages);
      Multiply(pair);
      const int next = n + ring_.stages();
      if (Products::kKept && next >= places_.num()) {
#pragma unroll
        for (int m = 0; m < 2; ++m) products_.Keep(pair.stages[m], pair.x[m]);
      }
      __syncwarp();  // all lanes have read the stages
      ring_.Load(next, min(max(places_.num() - next, 0), 2), places_.Of(min(next, places_.num() - 1)));
      AddPair(sums, at, pair, two);
    }
    C::Sync();
    select_tokens::AddUnits<kThreads, kUnits>(p_, part_, s_.units, s_.heads);
    return at;
  }

  // Second pass, backwards: the key of each position's weight, counted by bin. at: behind the warp's last tile.
  // weights: of the stream, or null.
  __device__ __forceinline__ void Weigh(const ChoiceBins& bins, Cursor at, float* weights) {
    const int c = static_cast<int>(threadIdx.x) % 4;
    float minus[kLaneHeads];  // taken from a head's exponents; a head that does not exist weighs nothing
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      const int head = products_.first_head() + h;
      const float2 sums = head < p_.group ? s_.heads[head] : float2{0, 0};
      minus[h] = sums.y > 0 ? sums.x - log2f(sums.y) : INFINITY;
    }
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
    ring_.TurnBack();
#pragma unroll 1
    for (int32_t n = (num - 1) & ~1; n >= 0; n -= 2) {
      Pair pair;
      const bool two = n + 1 < num, resident = n + ring_.stages() >= num;
      ring_.TakeBack(two ? 2 : 1, resident, pair.stages);
      if (Products::kKept && resident) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          products_.Units(packed_keys::LargestScale(pair.stages[m]), pair.units[m]);
          products_.TakeKept(pair.stages[m], pair.x[m]);
        }
      } else {
        Multiply(pair);
      }
      const int32_t next = n + (two ? 1 : 0) - ring_.stages();
      __syncwarp();
      ring_.LoadBack(next, next < 0 ? 0 : two ? 2 : 1, places_.Of(max(next, 0)));
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

 private:
  // Products of two tiles at a time, so that there is more to do between two steps that depend on each other.
  struct Pair {
    uint32_t stages[2];
    typename Products::Results x[2];
    float units[2][kLaneHeads];
  };
  __device__ __forceinline__ void Multiply(Pair& pair) const {
    const packed_keys::TileWords tiles[2] = {packed_keys::TileWords(pair.stages[0]),
                                             packed_keys::TileWords(pair.stages[1])};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      products_.Units(tiles[m].largest_scale, pair.units[m]);
      products_.Multiply(tiles[m], pair.x[m]);
    }
  }
  // Adds a pair, or the first of it, to the sums of their units, which are told when they end, and goes to the next.
  __device__ __forceinline__ void AddPair(RunningSum (&sums)[kLaneHeads][kSums], Cursor& at, Pair& pair, bool two) {
    for (int m = 0; m < 2; ++m) HideFrom(choosable_ - (at.tile + m) * kTile, pair.x[m], m == 0 || !at.last_of_unit());
    if (two && !at.last_of_unit() && AddBoth(sums, pair, at.first_of_unit())) {
      at.Advance();
    } else {
      AddScores(sums, pair.x[0], pair.units[0], at.first_of_unit());
      TellSums(sums, at);
      at.Advance();
      if (!two) return;
      HideFrom(choosable_ - at.tile * kTile, pair.x[1], at.first_of_unit());
      AddScores(sums, pair.x[1], pair.units[1], at.first_of_unit());
    }
    TellSums(sums, at);
    at.Advance();
  }
  // If the tile is the last one of its unit.
  __device__ __forceinline__ void TellSums(RunningSum (&sums)[kLaneHeads][kSums], const Cursor& at) {
    if (!at.last_of_unit()) return;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      TellUnit(at.unit, products_.first_head() + h, sums[h]);
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums[h][n] = RunningSum();
    }
  }
  // Both of a pair at once, of one unit. False, and nothing has been added, if a sum would have to count from a larger
  // score for one of them.
  __device__ __forceinline__ bool AddBoth(RunningSum (&sums)[kLaneHeads][kSums], const Pair& pair, bool first) const {
    float base[kLaneHeads][kSums], more[2][kLaneHeads][kSums];
    bool raise = false;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        base[h][n] = sums[h][n].base;
        if (first) base[h][n] = Largest(base[h][n], pair.x[0], n, h, pair.units[0][h]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          more[m][h][n] = SumOf(base[h][n], pair.x[m], n, h, pair.units[m][h]);
          raise |= !(more[m][h][n] < kLargest);
        }
      }
    }
    if (__any_sync(0xffffffffu, raise)) return false;
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sums[h][n] = {base[h][n], (sums[h][n].sum + more[0][h][n]) + more[1][h][n]};
    }
    return true;
  }
  // first: of the unit; the sums then count from the largest of its scores.
  __device__ __forceinline__ void AddScores(RunningSum (&sums)[kLaneHeads][kSums], const typename Products::Results& x,
                                            const float (&units)[kLaneHeads], bool first) const {
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) {
      float more[kSums];
      bool raise = first;
      if (!first) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
          more[n] = SumOf(sums[h][n].base, x, n, h, units[h]);
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
  // Without kWide lanes are raised together whose heads are all even or all odd.
  static __device__ __forceinline__ bool Raises(bool own) {
    const uint32_t all = __ballot_sync(0xffffffffu, own);
    if (kWide || all == 0) return all != 0;
    return (all & (threadIdx.x % 2 == 0 ? 0x55555555u : 0xaaaaaaaau)) != 0;
  }
  // Sum n of the exponentials of a head's scores, counted from `base`.
  __device__ __forceinline__ float SumOf(float base, const typename Products::Results& x, int n, int h,
                                         float unit) const {
    float sum[2] = {};
#pragma unroll
    for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += Exp2(fmaf(x[m][r][h], unit, -base));
    }
    return sum[0] + sum[1];
  }
  // The largest of those scores and `than`.
  __device__ __forceinline__ float Largest(float than, const typename Products::Results& x, int n, int h,
                                           float unit) const {
#pragma unroll
    for (int m = n; m < Products::kParts; m += kSums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) than = fmaxf(than, x[m][r][h] * unit);
    }
    return than;
  }
  // The same sum once `to` counts from the largest of these scores, if that is larger than what it counted from.
  __device__ __forceinline__ float Raise(RunningSum& to, const typename Products::Results& x, int n, int h,
                                         float unit) const {
    const float base = Largest(to.base, x, n, h, unit);
    to.sum *= Exp2(to.base - base);
    to.base = base;
    return SumOf(base, x, n, h, unit);
  }
  __device__ __forceinline__ void HideFrom(int32_t left, typename Products::Results& x, bool anything) const {
    if (!anything || left >= kTile) return;
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
  // The lanes that have other positions of this head add theirs; the unit's sums go to every block.
  __device__ __forceinline__ void TellUnit(int32_t unit, int head, const RunningSum (&own)[kSums]) {
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
