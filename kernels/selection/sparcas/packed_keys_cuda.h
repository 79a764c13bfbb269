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

// c[16x8] += a[16x32] b[32x8], of unsigned and signed bytes.
__device__ __forceinline__ void Mma16832(int32_t (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float LowOf(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighOf(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// PackedKeys::QueryFactor.
__device__ __forceinline__ float QueryFactor(float q_largest, float s_largest) {
  const int exponent = static_cast<int>(__float_as_uint(q_largest * s_largest) >> 23 & 255);
  return __uint_as_float(static_cast<uint32_t>(min(max(267 - exponent, 1), 253)) << 23);
}
// 1 / x of a power of two in [2^-126, 2^126].
__device__ __forceinline__ float Inverse(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

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
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(largest_scale) : "r"(tile + kPackedLargestAt) : "memory");
  }
};

// A warp's ring of tiles in shared memory. The tiles are taken in the order in which they were loaded, and then once
// more from the last one to the first: those that are still in the ring need not be read again, and the ones behind
// them were read last, so that the second-level cache has them more likely than the first ones.
class TileRing {
 public:
  static constexpr int kMaxStages = 16;
  // Bytes of a warp's barriers, and of its tiles.
  static constexpr int kBarrierBytes = 8 * kMaxStages;
  static __host__ __device__ constexpr int Bytes(int stages) { return stages * kPackedTileBytes; }

  // barriers, tiles: this warp's shared memory, 16-byte aligned. Nothing else may be stored where the barriers are,
  // also not once all tiles have been taken: such a store can be lost, and then a barrier is read in its place.
  __device__ __forceinline__ TileRing(char* barriers, char* tiles, int stages)
      : stages_(stages), barriers_(SmemAddress(barriers)), tiles_(SmemAddress(tiles)) {
    if (static_cast<int>(threadIdx.x) % 32 < stages) MbarrierInit(barriers_ + 8 * (threadIdx.x % 32), 1);
    MbarrierInitFence();
    __syncwarp();
  }
  __device__ __forceinline__ int stages() const { return stages_; }
  // The next tile goes to the next stage, which no lane reads any more.
  __device__ __forceinline__ void Load(const std::byte* tile) {
    Fetch(tile);
    load_ = load_ + 1 == stages_ ? 0 : load_ + 1;
    ++num_loaded_;
  }
  // The next tile in order, once it is there.
  __device__ __forceinline__ TileWords Take() {
    Wait();
    const TileWords words(tiles_ + take_ * kPackedTileBytes);
    take_ = take_ + 1 == stages_ ? 0 : take_ + 1;
    return words;
  }
  // Once all loaded tiles have been taken: TakeBack gives them from the last one to the first, if LoadBack is called
  // behind each with the tile that is num_resident() before it, as long as there is one.
  __device__ __forceinline__ void TurnBack() {
    take_ = load_ = take_ == 0 ? stages_ - 1 : take_ - 1;
    num_resident_ = min(num_loaded_, stages_);
  }
  __device__ __forceinline__ int num_resident() const { return min(num_loaded_, stages_); }
  __device__ __forceinline__ void LoadBack(const std::byte* tile) {
    Fetch(tile);
    load_ = load_ == 0 ? stages_ - 1 : load_ - 1;
  }
  __device__ __forceinline__ TileWords TakeBack() {
    if (num_resident_ > 0) {
      --num_resident_;
    } else {
      Wait();
    }
    const TileWords words(tiles_ + take_ * kPackedTileBytes);
    take_ = take_ == 0 ? stages_ - 1 : take_ - 1;
    return words;
  }

 private:
  __device__ __forceinline__ void Fetch(const std::byte* tile) {
    if (threadIdx.x % 32 != 0) return;
    const uint32_t bar = barriers_ + 8 * load_;
    MbarrierArriveExpect(bar, kPackedTileBytes);
    BulkLoad(tiles_ + load_ * kPackedTileBytes, tile, kPackedTileBytes, bar);
  }
  __device__ __forceinline__ void Wait() {
    MbarrierWait(barriers_ + 8 * take_, parities_ >> take_ & 1);
    parities_ ^= 1u << take_;
  }

  const int stages_;
  const uint32_t barriers_, tiles_;
  int load_ = 0, take_ = 0, num_loaded_ = 0, num_resident_ = 0;
  uint32_t parities_ = 0;  // parity of each stage's next load
};

// Products of a warp's tile with the query heads of a stream. kWide: up to 8 heads, one a column of the mma. Otherwise
// up to 4, whose high bytes are columns 0 to 3 and whose low bytes are columns 4 to 7; a lane then ends with the
// products of A (c < 2) or of B.
template <bool kWide>
class Products {
 public:
  static constexpr int kParts = kWide ? 4 : 2;
  // A lane has products [part][row][head] of position Position(part, row) and heads first_head(), first_head() + 1, in
  // units of 1 / QueryFactor.
  using Results = float[kParts][2][2];

  __device__ __forceinline__ Products() : g_(static_cast<int>(threadIdx.x) % 32 / 4), c_(threadIdx.x % 4) {}

  // q [group, head_dim] bf16; dims [32]. scale: of the softmax. All lanes.
  __device__ __forceinline__ void TakeQueries(const unsigned short* q, const int32_t* dims, int group, int head_dim,
                                              float scale) {
    const int head = kWide ? g_ : g_ % 4;
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
    for (int h = 0; h < 2; ++h) of_head_[h] = __shfl_sync(0xffffffffu, q_largest_, 4 * (first_head() + h));
    scale_ = scale;
  }
  __device__ __forceinline__ int first_head() const { return kWide ? 2 * c_ : 2 * (c_ & 1); }
  __device__ __forceinline__ int Position(int part, int row) const {
    return kWide ? 16 * part + 8 * row + g_ : 32 * part + 16 * (c_ >> 1) + 8 * row + g_;
  }

  // units: what a product must be multiplied by to be a score, for each of the lane's heads.
  __device__ __forceinline__ void Multiply(const TileWords& tile, Results& x, float (&units)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) units[h] = Inverse(QueryFactor(of_head_[h], tile.largest_scale)) * scale_;
    const float factor = QueryFactor(q_largest_, tile.largest_scale);
    const uint32_t scales[4] = {tile.scales.x, tile.scales.y, tile.scales.z, tile.scales.w};
    uint32_t rounded[8];  // the integer in the low bits of 1.5 2^23 + Q
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = i % 2 == 0 ? LowOf(scales[i / 2]) : HighOf(scales[i / 2]);
      rounded[i] = __float_as_uint(fmaf(q_[i] * s, factor, kMagic));
    }
    const uint4 eights = {0x08080808u, 0x08080808u, 0x08080808u, 0x08080808u};
    if constexpr (kWide) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        low[b] = Bytes<0>(&rounded[4 * b], 0);
        high[b] = Bytes<1>(&rounded[4 * b], 128);
      }
      int32_t eight_high[4] = {}, eight_low[4] = {};
      Mma16832(eight_high, eights, high[0], high[1]);
      Mma16832(eight_low, eights, low[0], low[1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 upper = Upper(tile.keys[r]);
        int32_t all[2][4] = {}, of_b[2][4] = {};
        Mma16832(all[0], tile.keys[r], high[0], high[1]);
        Mma16832(all[1], tile.keys[r], low[0], low[1]);
        Mma16832(of_b[0], upper, high[0], high[1]);
        Mma16832(of_b[1], upper, low[0], low[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t eight = 256 * eight_high[i] + eight_low[i];
          const int32_t m = 256 * of_b[0][i] + of_b[1][i], f = 256 * all[0][i] + all[1][i];
          x[2 * r][i / 2][i % 2] = ToFloat(f - m - eight);
          x[2 * r + 1][i / 2][i % 2] = ToFloat((m >> 4) - eight);
        }
      }
    } else {
      // Columns below 4 take the high bytes, the others the low ones.
      const bool low = g_ >= 4;
      uint32_t q[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) q[b] = low ? Bytes<0>(&rounded[4 * b], 0) : Bytes<1>(&rounded[4 * b], 128);
      int32_t eight[4] = {};
      Mma16832(eight, eights, q[0], q[1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int32_t all[4] = {}, of_b[4] = {};
        Mma16832(all, tile.keys[r], q[0], q[1]);
        Mma16832(of_b, Upper(tile.keys[r]), q[0], q[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t b = (of_b[i] >> 4) - eight[i], a = all[i] - of_b[i] - eight[i];
          // Lanes c < 2 have the high parts and end with A, the others have the low ones and end with B.
          const int32_t other = __shfl_xor_sync(0xffffffffu, c_ < 2 ? b : a, 2);
          x[r][i / 2][i % 2] = ToFloat(c_ < 2 ? 256 * a + other : 256 * other + b);
        }
      }
    }
  }

 private:
  static constexpr float kMagic = 12582912.0f;

  // Exact for |x| < 2^22, and faster than the conversion.
  static __device__ __forceinline__ float ToFloat(int32_t x) {
    return __uint_as_float(static_cast<uint32_t>(x + 0x4b400000)) - kMagic;
  }

  // Byte n of four numbers to which `more` is added.
  template <int n>
  static __device__ __forceinline__ uint32_t Bytes(const uint32_t* x, uint32_t more) {
    constexpr uint32_t kPick = n == 0 ? 0x0040 : 0x0051;  // byte n of both
    return __byte_perm(__byte_perm(x[0] + more, x[1] + more, kPick), __byte_perm(x[2] + more, x[3] + more, kPick),
                       0x5410);
  }
  static __device__ __forceinline__ uint4 Upper(const uint4& x) {
    constexpr uint32_t kUpper = 0xf0f0f0f0u;
    return {x.x & kUpper, x.y & kUpper, x.z & kUpper, x.w & kUpper};
  }

  const int g_, c_;
  float q_[8];
  float q_largest_, of_head_[2];  // largest |q| of the head of the lane's column, and of its results'
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
