// The running softmax of a warp in decode_attention_cuda.cu, over 16 tokens of each page, for all query heads of a KV
// head.
#pragma once

#include "kernels/attention/decode_splits_cuda.h"
#include "kernels/attention/decode_tiles_cuda.h"
#include "kernels/cuda/e4m3_cuda.h"

namespace spl::kernels::cuda::decode_attention {

// The part that does not depend on the type of the pages. In the places of an mma: a lane has tokens or dims g and g +
// 8 of a product's rows, and query heads 2 c and 2 c + 1 of its columns. kHeadTiles: 8 query heads each.
template <int kHeadDim, int kHeadTiles>
class RunningSoftmax {
 public:
  static constexpr int kMergeStride = kHeadDim + 4;  // floats; keeps the four lanes of a quad apart
  static constexpr int kMergeBytes = 8 * kHeadTiles * kMergeStride * 4;

  __device__ __forceinline__ explicit RunningSoftmax(float scale)
      : scale_(scale), lane_(threadIdx.x % 32), g_(lane_ / 4), c_(lane_ % 4) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) m_[t][0] = m_[t][1] = -INFINITY, l_[t][0] = l_[t][1] = 0;
  }

 protected:
  // dim(k, i): the dim that row g + 8 i of block k of the outputs is. Writes maxima and sums, max_sum [8 kHeadTiles],
  // and outputs times `by`, merge [8 kHeadTiles, kMergeStride].
  template <typename Dim>
  __device__ __forceinline__ void Store(float2* max_sum, float* merge, const Dim& dim, float by = 1) const {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = l_[t][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        const int column = 8 * t + 2 * c_ + h;
        if (g_ == 0) max_sum[column] = float2{m_[t][h], sum};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          merge[column * kMergeStride + dim(k, 0)] = o_[t][k][h] * by;
          merge[column * kMergeStride + dim(k, 1)] = o_[t][k][2 + h] * by;
        }
      }
    }
  }
  // Which of the tokens g and g + 8 of the 16 from `begin` on are visible.
  struct Visible {
    bool first, second;
    __device__ __forceinline__ Visible(int32_t j, int32_t kv_len, const ActiveSplits& splits)
        : first(j < kv_len && (j < splits.sinks || j >= splits.band_begin)),
          second(j + 8 < kv_len && (j + 8 < splits.sinks || j + 8 >= splits.band_begin)) {}
  };
  // Rows are tokens; as B operand they must be columns. Pairs: of tokens g, then g + 8.
  __device__ __forceinline__ void KeepWeights(int t, uint32_t near, uint32_t far) {
    weights_[t][0] = TransposeMatrix(near);
    weights_[t][1] = TransposeMatrix(far);
  }
  // Scores of one query head become weights; what was added up before shrinks to the new maximum, and outputs by `drop`
  // more.
  __device__ __forceinline__ void Weigh(int t, int h, float& s0, float& s1, Visible visible, float drop = 1) {
    s0 = visible.first ? s0 * scale_ : -INFINITY;
    s1 = visible.second ? s1 * scale_ : -INFINITY;
    float max = fmaxf(s0, s1);
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
    max = fmaxf(max, m_[t][h]);
    const float base = max == -INFINITY ? 0.0f : max;
    const float shrink = Exp2(m_[t][h] - base);
    m_[t][h] = max;
    s0 = Exp2(s0 - base);
    s1 = Exp2(s1 - base);
    l_[t][h] = l_[t][h] * shrink + (s0 + s1);  // this lane's tokens only
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      o_[t][k][h] *= shrink * drop;
      o_[t][k][2 + h] *= shrink * drop;
    }
  }

  const float scale_;  // sm_scale · log2(e)
  const int lane_, g_, c_;
  uint32_t q_[kHeadTiles][kHeadDim / 16][2];
  uint32_t weights_[kHeadTiles][2];
  float o_[kHeadTiles][kHeadDim / 16][4] = {};  // rows: dims 16 i + g (+8); columns: heads 2 c, 2 c + 1
  float m_[kHeadTiles][2], l_[kHeadTiles][2];
};

// Pages of bf16.
template <int kHeadDim, int kHeadTiles>
class WideSoftmax : public RunningSoftmax<kHeadDim, kHeadTiles> {
  using Base = RunningSoftmax<kHeadDim, kHeadTiles>;
  using Base::c_, Base::g_, Base::lane_, Base::o_, Base::q_, Base::weights_;
  static constexpr int kRowBytes = 2 * kHeadDim;

 public:
  using Base::Base;

  // q: of the KV head's `group` query heads. As B operand: the lane holds head g, dims 16 k + 2 c (+1, +8, +9).
  __device__ __forceinline__ void LoadQueries(const __nv_bfloat16* q, int group) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const bool exists = 8 * t + g_ < group;
      const auto* row = reinterpret_cast<const uint32_t*>(q + (exists ? 8 * t + g_ : 0) * kHeadDim);
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        q_[t][k][0] = exists ? row[8 * k + c_] : 0;
        q_[t][k][1] = exists ? row[8 * k + c_ + 4] : 0;
      }
    }
  }

  // Scores of the tile in shared memory at k_tile, whose first token is `begin`.
  template <typename Ring>
  __device__ __forceinline__ void Score(const Ring&, uint32_t k_tile, int32_t begin, int32_t kv_len,
                                        const ActiveSplits& splits) {
    // Two chains of products, for one alone waits for each of its own.
    constexpr int kChains = kHeadTiles == 1 ? 2 : 1;
    float s[kHeadTiles][4] = {}, odd[kHeadTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4(a, k_tile + Swizzled<kRowBytes>(lane_ & 15, 2 * k + lane_ / 16));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(k % kChains == 0 ? s[t] : odd[t], a, q_[t][k][0], q_[t][k][1]);
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][i] += odd[0][i];
    }
    const typename Base::Visible visible(begin + g_, kv_len, splits);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) this->Weigh(t, h, s[t][h], s[t][2 + h], visible);
      this->KeepWeights(t, PackBf16(s[t][0], s[t][1]), PackBf16(s[t][2], s[t][3]));
    }
  }
  // Adds the values of the same tile, by the weights of its scores.
  __device__ __forceinline__ void Add(uint32_t v_tile) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4Trans(a, v_tile + Swizzled<kRowBytes>(lane_ / 16 * 8 + (lane_ & 7), 2 * k + (lane_ >> 3 & 1)));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(o_[t][k], a, weights_[t][0], weights_[t][1]);
    }
  }

  __device__ __forceinline__ void Store(float2* max_sum, float* merge) const {
    Base::Store(max_sum, merge, [this](int k, int i) { return 16 * k + 8 * i + g_; });
  }
};

// Pages of codes. A product takes dims in an order of its own, in which a lane's operands are neighbours in memory:
// of each 64 dims of a key lane c has 16 c to + 15, and of a value lane g has kHeadDim / 8 from that times g on.
//
// Codes become f16 in one instruction for two. Queries are scaled by a power of two to fit f16, which holds more bits
// of them than bf16 does; keys' scales and the queries' are applied to the scores. Values' scales are applied to the
// weights, relative to the largest scale so far, `top_`, so that weights stay below 1.
template <int kHeadDim, int kHeadTiles>
class CodeSoftmax : public RunningSoftmax<kHeadDim, kHeadTiles> {
  using Base = RunningSoftmax<kHeadDim, kHeadTiles>;
  using Base::c_, Base::g_, Base::o_, Base::q_, Base::weights_;
  using Tiles = CodeTiles<kHeadDim>;
  static constexpr int kLaneWords = kHeadDim / 32;  // a lane's part of a value

 public:
  using Base::Base;

  __device__ __forceinline__ void LoadQueries(const __nv_bfloat16* q, int group) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const bool exists = 8 * t + g_ < group;
      const auto* row = reinterpret_cast<const uint2*>(q + (exists ? 8 * t + g_ : 0) * kHeadDim);
      float largest = 0;
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        const uint2 dims = row[16 * (k / 4) + 4 * c_ + k % 4];
        q_[t][k][0] = exists ? dims.x : 0;
        q_[t][k][1] = exists ? dims.y : 0;
#pragma unroll
        for (const uint32_t pair : q_[t][k]) largest = fmaxf(largest, fmaxf(fabsf(Low(pair)), fabsf(High(pair))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // The largest becomes 2^14 to 2^15.
      const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 254u);
      const float up = __uint_as_float((268u - exponent) << 23), down = __uint_as_float((exponent - 14u) << 23);
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
        for (uint32_t& pair : q_[t][k]) pair = PackHalf(Low(pair) * up, High(pair) * up);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) q_scale_[t][h] = __shfl_sync(0xffffffffu, down, 4 * (2 * c_ + h));
    }
  }

  template <typename Ring>
  __device__ __forceinline__ void Score(const Ring& ring, uint32_t k_tile, int32_t begin, int32_t kv_len,
                                        const ActiveSplits& splits) {
    constexpr int kChains = kHeadTiles == 1 ? 2 : 1;
    float s[kHeadTiles][4] = {}, odd[kHeadTiles][4] = {};
#pragma unroll
    for (int span = 0; span < kHeadDim / 64; ++span) {
      const uint4 near = LoadShared16(k_tile + Tiles::Place(g_, 4 * span + c_)),
                  far = LoadShared16(k_tile + Tiles::Place(g_ + 8, 4 * span + c_));
      const uint32_t near_words[4] = {near.x, near.y, near.z, near.w}, far_words[4] = {far.x, far.y, far.z, far.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint2 first = HalfQuad(near_words[w]), second = HalfQuad(far_words[w]);
        const uint32_t a[4] = {first.x, second.x, first.y, second.y};
        const int k = 4 * span + w;
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t)
          Mma16816Half(k % kChains == 0 ? s[t] : odd[t], a, q_[t][k][0], q_[t][k][1]);
      }
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][i] += odd[0][i];
    }
    const typename Base::Visible visible(begin + g_, kv_len, splits);
    const float k_near = RowScaleFloat(ring.Scale(0, g_)), k_far = RowScaleFloat(ring.Scale(0, g_ + 8));
    // Scales of slots that nothing was written to may be anything.
    const uint32_t v_near = visible.first ? ring.Scale(1, g_) : 0, v_far = visible.second ? ring.Scale(1, g_ + 8) : 0;
    const uint32_t top = max(top_, __reduce_max_sync(0xffffffffu, max(v_near, v_far)));
    const float drop = PowerOf(top_, top), by_near = PowerOf(v_near, top), by_far = PowerOf(v_far, top);
    top_ = top;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[t][h] *= k_near * q_scale_[t][h];
        s[t][2 + h] *= k_far * q_scale_[t][h];
        this->Weigh(t, h, s[t][h], s[t][2 + h], visible, drop);
      }
      this->KeepWeights(t, PackHalf(s[t][0] * by_near, s[t][1] * by_near),
                        PackHalf(s[t][2] * by_far, s[t][3] * by_far));
    }
  }

  __device__ __forceinline__ void Add(uint32_t v_tile) {
    // Tokens 2 c, 2 c + 1 and the same of the last 8: the lane's dims of each.
    uint32_t rows[4][kLaneWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * c_ + i % 2 + i / 2 * 8;
      if constexpr (kHeadDim == 128) {
        const uint4 x = LoadShared16(v_tile + Tiles::Place(token, g_));
        rows[i][0] = x.x, rows[i][1] = x.y, rows[i][2] = x.z, rows[i][3] = x.w;
      } else {
        const uint2 x = LoadShared8(v_tile + Tiles::Place(token, g_ / 2) + g_ % 2 * 8);
        rows[i][0] = x.x, rows[i][1] = x.y;
      }
    }
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      // Two dims of a word, each of two tokens.
      const int w = k / 2, dims = k % 2 == 0 ? 0x5140 : 0x7362;
      const uint2 near = HalfQuad(__byte_perm(rows[0][w], rows[1][w], dims)),
                  far = HalfQuad(__byte_perm(rows[2][w], rows[3][w], dims));
      const uint32_t a[4] = {near.x, near.y, far.x, far.y};
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816Half(o_[t][k], a, weights_[t][0], weights_[t][1]);
    }
  }

  __device__ __forceinline__ void Store(float2* max_sum, float* merge) const {
    Base::Store(
        max_sum, merge, [this](int k, int i) { return kHeadDim / 8 * g_ + 2 * k + i; }, RowScaleFloat(top_));
  }

 private:
  __device__ __forceinline__ static float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  // 2^(scale - top), zero where a float does not hold it; NaN for a row that is not finite.
  __device__ __forceinline__ static float PowerOf(uint32_t scale, uint32_t top) {
    const int exponent = max(127 + static_cast<int>(scale) - static_cast<int>(top), 0);
    return scale > kMaxRowScale ? __uint_as_float(0x7fc00000u) : __uint_as_float(static_cast<uint32_t>(exponent) << 23);
  }

  float q_scale_[kHeadTiles][2];  // heads 2 c and 2 c + 1
  uint32_t top_ = 0;
};

}  // namespace spl::kernels::cuda::decode_attention
