// Packed keys on a device: the order of their 4-bit values, packing, and scores by tensor cores. Included by .cu files
// only.
//
// A byte of a tile has a dimension of two positions, A in its low and B = A + 16 in its high four bits, and a tile is
// 32 x 32 bytes in the order of the left operand of mma m16n8k32 of bytes: [2][32 lanes][16 bytes], so that a lane's 16
// bytes of half r are its registers. With integers in the right operand nothing needs to be unpacked: the products F of
// the bytes and M of their high halves give those of B as M / 16, and those of A as F - M.
//
// Queries are integers of 15 bits (packed_keys.h), two signed bytes each: Q = 256 high + low.
#pragma once

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/selection/sparcas/packed_keys.h"

namespace spl::kernels::cuda::packed_keys {

inline constexpr int kTile = kPageTokens;
static_assert(kPackedDims == 32 && kTile == 64);

// d[16x8] = c[16x8] + a[16x32] b[32x8], of unsigned and signed bytes.
__device__ __forceinline__ void Mma16832(uint32_t (&d)[4], const uint4& a, const uint32_t (&b)[2],
                                         const uint32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// The same with a left operand whose bytes are all `a`, signed.
__device__ __forceinline__ void MmaOfOne(uint32_t (&d)[4], uint32_t a, const uint32_t (&b)[2], const uint32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%6}, {%7,%8,%9,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ float LowOf(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighOf(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// PackedKeys::QueryFactor as its bits are: a power of two, whose exponent falls as that of the product rises.
struct QueryFactor {
  uint32_t product;  // the exponent of q_largest s_largest, in its place
  __device__ __forceinline__ QueryFactor(float q_largest, float s_largest) {
    product = max(__float_as_uint(q_largest * s_largest) & 0x7f800000u, 14u << 23);
  }
  __device__ __forceinline__ float factor() const { return __uint_as_float((267u << 23) - product); }
  __device__ __forceinline__ float inverse() const { return __uint_as_float(product - (13u << 23)); }
};

__device__ __forceinline__ float LargestScale(uint32_t tile) {
  return __uint_as_float(LoadShared4(tile + kPackedLargestAt));
}

// A lane's words of a tile in shared memory.
struct TileWords {
  uint4 keys[2];  // left operand of each half
  float largest_scale;

  __device__ __forceinline__ explicit TileWords(uint32_t tile) {
    const uint32_t lane = threadIdx.x % 32;
    keys[0] = LoadShared16(tile + lane * 16);
    keys[1] = LoadShared16(tile + 512 + lane * 16);
    largest_scale = LargestScale(tile);
  }
  // Scales of dimensions 4 c to 4 c + 3, and of those 16 further.
  static __device__ __forceinline__ uint4 Scales(uint32_t tile) {
    return LoadShared16(tile + kPackedScalesAt + threadIdx.x % 4 * 16);
  }
};

// A warp's ring of pairs of tiles in shared memory. The pairs are taken in the order in which they were loaded, and
// then once more from the last one to the first: those that are still in the ring need not be read again, and the ones
// behind them were read last, so that the second-level cache has them more likely than the first ones.
class TileRing {
 public:
  static constexpr int kMaxStages = 16;  // tiles
  // Bytes of a warp's barriers, and of its tiles.
  static constexpr int kBarrierBytes = 8 * kMaxStages / 2;
  static __host__ __device__ constexpr int Bytes(int stages) { return stages * kPackedTileBytes; }

  // stages is even. barriers, tiles: this warp's shared memory, 16-byte aligned. Nothing else may be stored where the
  // barriers are, also not once all tiles have been taken: such a store can be lost, and then a barrier is read in its
  // place.
  __device__ __forceinline__ TileRing(char* barriers, char* tiles, int stages)
      : slots_(stages / 2), barriers_(SmemAddress(barriers)), tiles_(SmemAddress(tiles)) {
    if (static_cast<int>(threadIdx.x) % 32 < slots_) MbarrierInit(barriers_ + 8 * (threadIdx.x % 32), 1);
    MbarrierInitFence();
    __syncwarp();
  }
  __device__ __forceinline__ int stages() const { return 2 * slots_; }
  // Tiles n and, if num is 2, n + 1 go to a slot that no lane reads any more. n is even. Lane i % 32 knows what is
  // copied from the place of tile i: itself and perhaps the one behind it, or nothing.
  __device__ __forceinline__ void Load(int slot, int n, int num, const std::byte* place, int bytes) {
    const int which = static_cast<int>(threadIdx.x - n) & 31;
    if (which >= num || bytes == 0) return;
    const uint32_t bar = barriers_ + 8 * slot;
    if (which == 0) MbarrierArriveExpect(bar, num * kPackedTileBytes);
    BulkLoad(tiles_ + (2 * slot + which) * kPackedTileBytes, place, bytes, bar);
  }
  // The tiles of the next pair in order, once they are there, and their slot: pair p is expected in slot p modulo their
  // number. A single tile stands for both.
  __device__ __forceinline__ int Take(bool two, uint32_t (&tiles)[2]) {
    const int slot = next_;
    Wait(slot);
    Give(slot, two, tiles);
    next_ = slot + 1 == slots_ ? 0 : slot + 1;
    return slot;
  }
  // Once all tiles have been taken: TakeBack gives the pairs from the last one to the first. Those that are still here
  // (resident) are not waited for; into the slot of each that has been read goes the pair that is stages() tiles
  // before.
  __device__ __forceinline__ void TurnBack() { next_ = Before(next_); }
  __device__ __forceinline__ int TakeBack(bool two, bool resident, uint32_t (&tiles)[2]) {
    const int slot = next_;
    if (!resident) Wait(slot);
    Give(slot, two, tiles);
    next_ = Before(slot);
    return slot;
  }

 private:
  __device__ __forceinline__ int Before(int slot) const { return slot == 0 ? slots_ - 1 : slot - 1; }
  __device__ __forceinline__ void Give(int slot, bool two, uint32_t (&tiles)[2]) const {
    tiles[0] = tiles_ + slot * (2 * kPackedTileBytes);
    tiles[1] = two ? tiles[0] + kPackedTileBytes : tiles[0];
  }
  __device__ __forceinline__ void Wait(int slot) {
    MbarrierWait(barriers_ + 8 * slot, parities_ >> slot & 1);
    parities_ ^= 1u << slot;
  }

  const int slots_;
  const uint32_t barriers_, tiles_;
  int next_ = 0;           // the slot that is taken next
  uint32_t parities_ = 0;  // parity of each slot's next load
};

// Products of a warp's tile with the query heads of a stream. kWide: up to 8 heads, one a column of the mma, which is
// taken twice, with their high and their low bytes. Otherwise up to 4, whose high bytes are the even columns and whose
// low bytes are the odd ones, so that a lane has both of its head.
//
// Integer operations are the scarce ones: a multiprocessor makes half as many of them in a cycle as of floats. So
// results are never converted: the mma begins from 1.5 2^23, and what it adds is then the mantissa of a float.
template <bool kWide>
class Products {
 public:
  static constexpr int kParts = 4, kLaneHeads = kWide ? 2 : 1;
  static constexpr bool kKept = !kWide;  // as many bytes as a lane's keys: they fit in their place
  // A lane has products [part][row][head] of position Position(part, row) and heads first_head() and following, in
  // units of 1 / QueryFactor.
  using Results = float[kParts][2][kLaneHeads];

  __device__ __forceinline__ Products()
      : g_(static_cast<int>(threadIdx.x) % 32 / 4),
        c_(threadIdx.x % 4),
        rounding_(kWide || g_ % 2 == 0 ? kMagic + 128 : kMagic),
        pick_(kWide || g_ % 2 == 0 ? kPickHigh : kPickLow) {}

  // q [4 or, if kWide, 8][32] in shared memory: the dimensions of each head. scale: of the softmax. All lanes.
  __device__ __forceinline__ void TakeQueries(const float* q, float scale) {
    const int head = kWide ? g_ : g_ / 2;
    float largest = 0;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float4 x = *reinterpret_cast<const float4*>(q + head * kPackedDims + 16 * b + 4 * c_);
      q_[4 * b] = x.x, q_[4 * b + 1] = x.y, q_[4 * b + 2] = x.z, q_[4 * b + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(q_[i]));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    q_largest_ = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) of_head_[h] = __shfl_sync(0xffffffffu, q_largest_, 8 * c_ + 4 * h);
    scale_ = scale;
  }
  __device__ __forceinline__ int first_head() const { return kLaneHeads * c_; }
  __device__ __forceinline__ int Position(int part, int row) const { return 16 * part + 8 * row + g_; }

  // The factors that make scores of a tile's products, for each of the lane's heads.
  __device__ __forceinline__ void Units(float largest_scale, float (&units)[kLaneHeads]) const {
#pragma unroll
    for (int h = 0; h < kLaneHeads; ++h) units[h] = QueryFactor(of_head_[h], largest_scale).inverse() * scale_;
  }
  // The queries as they are rounded in a tile: a lane's right operands.
  struct Operands {
    uint32_t q[kWide ? 4 : 2];
  };
  __device__ __forceinline__ Operands Round(const uint4& of_dims, float largest_scale) const {
    const float factor = QueryFactor(q_largest_, largest_scale).factor();
    const uint32_t scales[4] = {of_dims.x, of_dims.y, of_dims.z, of_dims.w};
    uint32_t rounded[8];  // Q, or Q + 128 where its high byte is wanted, in the low bits
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = i % 2 == 0 ? LowOf(scales[i / 2]) : HighOf(scales[i / 2]);
      rounded[i] = __float_as_uint(fmaf(q_[i] * s, factor, rounding_));
    }
    Operands to;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      to.q[b] = Bytes(&rounded[4 * b], kWide ? kPickHigh : pick_);
      if constexpr (kWide) to.q[2 + b] = Bytes(&rounded[4 * b], kPickLow) ^ 0x80808080u;
    }
    return to;
  }
  __device__ __forceinline__ void Multiply(const uint4 (&keys)[2], const Operands& queries, Results& x) const {
    const uint32_t q[2] = {queries.q[0], queries.q[1]};
    const Starts starts(q);
    if constexpr (kWide) {  // q: high bytes
      const uint32_t low[2] = {queries.q[2], queries.q[3]};
      const Starts of_low(low);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Sums high_sums(keys[r], q, starts), low_sums(keys[r], low, of_low);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[2 * r][i / 2][i % 2] = high_sums.OfA(low_sums, i, i);
          x[2 * r + 1][i / 2][i % 2] = high_sums.OfB(low_sums, i, i);
        }
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Sums sums(keys[r], q, starts);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[2 * r][i][0] = sums.OfA(sums, 2 * i, 2 * i + 1);
          x[2 * r + 1][i][0] = sums.OfB(sums, 2 * i, 2 * i + 1);
        }
      }
    }
  }

  // The products take the place of the keys that this lane has read from the tile.
  static __device__ __forceinline__ void Keep(uint32_t tile, const Results& x) {
    const uint32_t at = tile + threadIdx.x % 32 * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      StoreShared16(at + r * 512, __float_as_uint(x[2 * r][0][0]), __float_as_uint(x[2 * r][1][0]),
                    __float_as_uint(x[2 * r + 1][0][0]), __float_as_uint(x[2 * r + 1][1][0]));
  }
  static __device__ __forceinline__ void TakeKept(uint32_t tile, Results& x) {
    const uint32_t at = tile + threadIdx.x % 32 * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 w = LoadShared16(at + r * 512);
      x[2 * r][0][0] = __uint_as_float(w.x), x[2 * r][1][0] = __uint_as_float(w.y);
      x[2 * r + 1][0][0] = __uint_as_float(w.z), x[2 * r + 1][1][0] = __uint_as_float(w.w);
    }
  }

 private:
  static constexpr float kMagic = 12582912.0f;                      // 1.5 2^23
  static constexpr uint32_t kMagicBits = 0x4b400000u;               // its bits
  static constexpr uint32_t kPickLow = 0x0040, kPickHigh = 0x0051;  // bytes 0 and bytes 1 of two numbers

  // The numbers from which a tile's products begin. Levels are kept as n + 8, so that 8 ΣQ is taken from those of A and
  // 16 times as much from M; F has both.
  struct Starts {
    uint32_t m[4], f[4];
    __device__ __forceinline__ explicit Starts(const uint32_t (&q)[2]) {
      const uint32_t magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
      MmaOfOne(m, 0x80808080u, q, magic);
      MmaOfOne(f, 0xf8f8f8f8u, q, m);
    }
  };
  // M and F of one half of a tile, less what Starts says, above kMagic.
  struct Sums {
    uint32_t m[4], f[4];
    __device__ __forceinline__ Sums(const uint4& keys, const uint32_t (&q)[2], const Starts& starts) {
      constexpr uint32_t kUpper = 0xf0f0f0f0u;
      Mma16832(m, {keys.x & kUpper, keys.y & kUpper, keys.z & kUpper, keys.w & kUpper}, q, starts.m);
      Mma16832(f, keys, q, starts.f);
    }
    // 256 times number `high` of these and number `low` of the others. No step rounds: the results have 23 bits.
    __device__ __forceinline__ float OfA(const Sums& others, int high, int low) const {
      return fmaf(F(high) - M(high), 256.0f, others.F(low) - others.M(low));
    }
    __device__ __forceinline__ float OfB(const Sums& others, int high, int low) const {
      return fmaf(others.M(low), 0.0625f, fmaf(M(high), 16.0f, -16.0625f * kMagic));
    }
    __device__ __forceinline__ float M(int i) const { return __uint_as_float(m[i]); }
    __device__ __forceinline__ float F(int i) const { return __uint_as_float(f[i]); }
  };
  // The picked byte of four numbers.
  static __device__ __forceinline__ uint32_t Bytes(const uint32_t* x, uint32_t pick) {
    return __byte_perm(__byte_perm(x[0], x[1], pick), __byte_perm(x[2], x[3], pick), 0x5410);
  }

  const int g_, c_;
  const float rounding_;
  const uint32_t pick_;
  float q_[8];
  float q_largest_, of_head_[kLaneHeads];  // largest |q| of the head of the lane's column, and of its results'
  float scale_;
};

// Elements `dim` of two neighbouring keys of a tile, in bf16. keys: [64, head_dim] bf16, or codes and then their
// scales.
struct WideKeys {
  const unsigned short* keys;
  int head_dim;
  __device__ __forceinline__ uint32_t Pair(int row, int dim) const {
    const uint32_t low = keys[row * head_dim + dim], high = keys[(row + 1) * head_dim + dim];
    return low | high << 16;
  }
};
struct CodeKeys {
  const uint8_t* keys;
  int head_dim;
  __device__ __forceinline__ uint32_t Pair(int row, int dim) const {
    const uint32_t low = keys[row * head_dim + dim], high = keys[(row + 1) * head_dim + dim];
    const uint8_t* scales = keys + kTile * head_dim + row;
    const __nv_bfloat162 factor{RowFactor(scales[0]).x, RowFactor(scales[1]).x};
    return TimesRowFactor(SmallBf16Pair(low << 8 | high << 24), factor);
  }
};

// Packs one tile; a warp. Lane i has the dimension of slot i.
template <typename Keys>
__device__ __forceinline__ void PackTile(const Keys& keys, int dim, std::byte* tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t pairs[kTile / 2];
  float largest = 0;
#pragma unroll
  for (int r = 0; r < kTile / 2; ++r) pairs[r] = keys.Pair(2 * r, dim);
#pragma unroll
  for (int r = 0; r < kTile / 2; ++r) largest = fmaxf(largest, fmaxf(fabsf(LowOf(pairs[r])), fabsf(HighOf(pairs[r]))));
  const uint32_t scale_bits = PackBf16(__fdiv_rn(largest, 7.0f), 0.0f) & 0xffffu;
  const float scale = __uint_as_float(scale_bits << 16);
  const auto level = [&](int row) {
    const float key = row % 2 == 0 ? LowOf(pairs[row / 2]) : HighOf(pairs[row / 2]);
    return scale == 0 ? 8 : __float2int_rn(fminf(fmaxf(__fdiv_rn(key, scale), -7.0f), 7.0f)) + 8;
  };
  const int half = lane / 16, c = lane % 16 / 4, byte = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const int a = 32 * r + 8 * i + g;
        tile[512 * r + (4 * g + c) * 16 + (2 * half + i) * 4 + byte] =
            static_cast<std::byte>(level(a) | level(a + 16) << 4);
      }
    }
  }
  *reinterpret_cast<unsigned short*>(tile + kPackedScalesAt + c * 16 + half * 8 + byte * 2) =
      static_cast<unsigned short>(scale_bits);
  float most = scale;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  if (lane == 0) *reinterpret_cast<float*>(tile + kPackedLargestAt) = most;
}

}  // namespace spl::kernels::cuda::packed_keys
