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
  uint4 scales;   // scales of dimensions 4 c to 4 c + 3, and of those 16 further
  float largest_scale;

  __device__ __forceinline__ explicit TileWords(uint32_t tile) {
    const uint32_t lane = threadIdx.x % 32;
    keys[0] = LoadShared16(tile + lane * 16);
    keys[1] = LoadShared16(tile + 512 + lane * 16);
    scales = LoadShared16(tile + kPackedScalesAt + lane % 4 * 16);
    largest_scale = LargestScale(tile);
  }
};

// A warp's ring of tiles in shared memory. The tiles are taken in the order in which they were loaded, two at a time,
// and then once more from the last one to the first: those that are still in the ring need not be read again, and the
// ones behind them were read last, so that the second-level cache has them more likely than the first ones.
//
// Behind each two that are taken one load is asked for, be it empty: what is waited for is counted in loads.
class TileRing {
 public:
  static constexpr int kMaxStages = 16;
  static __host__ __device__ constexpr int Bytes(int stages) { return stages * kPackedTileBytes; }

  // tiles: this warp's shared memory, 16-byte aligned. stages is even.
  __device__ __forceinline__ TileRing(char* tiles, int stages)
      : stages_(stages), lane_(static_cast<int>(threadIdx.x) % 32), tiles_(SmemAddress(tiles)) {}
  __device__ __forceinline__ int stages() const { return stages_; }
  // Tiles n and n + 1, as many as num says, go to the next stages, which no lane reads any more. Lane i % 32 knows
  // where tile i is. All lanes.
  __device__ __forceinline__ void Load(int n, int num, const std::byte* place) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (m < num) Copy(load_ + m >= stages_ ? load_ + m - stages_ : load_ + m, Of(n + m, place));
    }
    CpAsyncCommit();
    load_ = load_ + num >= stages_ ? load_ + num - stages_ : load_ + num;
  }
  // The next tiles, one or two, once they are there. A single one stands for both.
  __device__ __forceinline__ void Take(int num, uint32_t (&tiles)[2]) {
    Wait();
    tiles[0] = At(take_);
    if (num == 2) take_ = Next(take_);
    tiles[1] = At(take_);
    take_ = Next(take_);
  }
  // Behind the last tile: TakeBack gives them from the last one to the first, of which the first stages() are still
  // here (resident), if LoadBack is called for the tiles that are stages() before those taken, as soon as they have
  // been read.
  __device__ __forceinline__ void TurnBack() { take_ = load_ = Previous(take_); }
  // Tiles n and n - 1; as Load.
  __device__ __forceinline__ void LoadBack(int n, int num, const std::byte* place) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (m < num) Copy(load_ - m < 0 ? load_ - m + stages_ : load_ - m, Of(n - m, place));
    }
    CpAsyncCommit();
    load_ = load_ - num < 0 ? load_ - num + stages_ : load_ - num;
  }
  // tiles[1] is the later one.
  __device__ __forceinline__ void TakeBack(int num, bool resident, uint32_t (&tiles)[2]) {
    if (!resident) Wait();
    tiles[1] = At(take_);
    if (num == 2) take_ = Previous(take_);
    tiles[0] = At(take_);
    take_ = Previous(take_);
  }

 private:
  __device__ __forceinline__ uint32_t At(int stage) const { return tiles_ + stage * kPackedTileBytes; }
  __device__ __forceinline__ int Next(int stage) const { return stage + 1 == stages_ ? 0 : stage + 1; }
  __device__ __forceinline__ int Previous(int stage) const { return stage == 0 ? stages_ - 1 : stage - 1; }
  static __device__ __forceinline__ const std::byte* Of(int n, const std::byte* place) {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(place), n & 31));  // NOLINT: the type it takes
  }
  __device__ __forceinline__ void Copy(int stage, const std::byte* tile) {
    constexpr int kPieces = kPackedTileBytes / 16;
    static_assert(kPackedTileBytes % 16 == 0 && kPieces > 64 && kPieces <= 96);
    const std::byte* const from = tile + lane_ * 16;
    const uint32_t to = At(stage) + lane_ * 16;
    CpAsync16(to, from, true);
    CpAsync16(to + 512, from + 512, true);
    if (lane_ < kPieces - 64) CpAsync16(to + 1024, from + 1024, true);
  }
  // All but the last stages / 2 - 1 loads are there.
  __device__ __forceinline__ void Wait() const {
    static_assert(kMaxStages == 16);
    switch (stages_ / 2) {
      case 1:
        CpAsyncWait<0>();
        break;
      case 2:
        CpAsyncWait<1>();
        break;
      case 3:
        CpAsyncWait<2>();
        break;
      case 4:
        CpAsyncWait<3>();
        break;
      case 5:
        CpAsyncWait<4>();
        break;
      case 6:
        CpAsyncWait<5>();
        break;
      case 7:
        CpAsyncWait<6>();
        break;
      default:
        CpAsyncWait<7>();
        break;
    }
    __syncwarp();
  }

  const int stages_, lane_;
  const uint32_t tiles_;
  int load_ = 0, take_ = 0;
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

  // q [group, head_dim] bf16; dims [32]. scale: of the softmax. All lanes.
  __device__ __forceinline__ void TakeQueries(const unsigned short* q, const int32_t* dims, int group, int head_dim,
                                              float scale) {
    const int head = kWide ? g_ : g_ / 2;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = head < group ? q[head * head_dim + dims[16 * (i / 4) + 4 * c_ + i % 4]] : 0;
      q_[i] = __uint_as_float(bits << 16);
      largest = fmaxf(largest, fabsf(q_[i]));
    }
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
  __device__ __forceinline__ void Multiply(const TileWords& tile, Results& x) const {
    const float factor = QueryFactor(q_largest_, tile.largest_scale).factor();
    const uint32_t scales[4] = {tile.scales.x, tile.scales.y, tile.scales.z, tile.scales.w};
    uint32_t rounded[8];  // Q, or Q + 128 where its high byte is wanted, in the low bits
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = i % 2 == 0 ? LowOf(scales[i / 2]) : HighOf(scales[i / 2]);
      rounded[i] = __float_as_uint(fmaf(q_[i] * s, factor, rounding_));
    }
    if constexpr (kWide) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        high[b] = Bytes(&rounded[4 * b], kPickHigh);
        low[b] = Bytes(&rounded[4 * b], kPickLow) ^ 0x80808080u;
      }
      const Starts of_high(high), of_low(low);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Sums high_sums(tile.keys[r], high, of_high), low_sums(tile.keys[r], low, of_low);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[2 * r][i / 2][i % 2] = high_sums.OfA(low_sums, i, i);
          x[2 * r + 1][i / 2][i % 2] = high_sums.OfB(low_sums, i, i);
        }
      }
    } else {
      const uint32_t q[2] = {Bytes(&rounded[0], pick_), Bytes(&rounded[4], pick_)};
      const Starts starts(q);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Sums sums(tile.keys[r], q, starts);
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
