// The running softmax of a warp in decode_attention_cuda.cu, over 16 tokens of each page, for all query heads of a KV
// head.
#pragma once

#include "kernels/attention/decode_splits_cuda.h"

namespace spl::kernels::cuda::decode_attention {

// In the places of an mma: a lane has tokens or dims g and g + 8 of a product's rows, and query heads 2 c and 2 c + 1
// of its columns. kHeadTiles: 8 query heads each.
template <int kHeadDim, int kHeadTiles>
class RunningSoftmax {
 public:
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kMergeStride = kHeadDim + 4;  // floats; keeps the four lanes of a quad apart
  static constexpr int kMergeBytes = 8 * kHeadTiles * kMergeStride * 4;

  __device__ __forceinline__ explicit RunningSoftmax(float scale)
      : scale_(scale), lane_(threadIdx.x % 32), g_(lane_ / 4), c_(lane_ % 4) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) m_[t][0] = m_[t][1] = -INFINITY, l_[t][0] = l_[t][1] = 0;
  }

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
  __device__ __forceinline__ void Score(uint32_t k_tile, int32_t begin, int32_t kv_len, const ActiveSplits& splits) {
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
    const int32_t j = begin + g_;
    const bool visible0 = j < kv_len && (j < splits.sinks || j >= splits.band_begin);
    const bool visible1 = j + 8 < kv_len && (j + 8 < splits.sinks || j + 8 >= splits.band_begin);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) Weigh(t, h, s[t][h], s[t][2 + h], visible0, visible1);
      // Rows are tokens; as B operand they must be columns.
      weights_[t][0] = TransposeMatrix(PackBf16(s[t][0], s[t][1]));
      weights_[t][1] = TransposeMatrix(PackBf16(s[t][2], s[t][3]));
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

  // Writes maxima and sums, max_sum [8 kHeadTiles], and outputs, merge [8 kHeadTiles, kMergeStride].
  __device__ __forceinline__ void Store(float2* max_sum, float* merge) const {
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
          merge[column * kMergeStride + 16 * k + g_] = o_[t][k][h];
          merge[column * kMergeStride + 16 * k + g_ + 8] = o_[t][k][2 + h];
        }
      }
    }
  }

 private:
  // Scores of one query head become weights; what was added up before shrinks to the new maximum.
  __device__ __forceinline__ void Weigh(int t, int h, float& s0, float& s1, bool visible0, bool visible1) {
    s0 = visible0 ? s0 * scale_ : -INFINITY;
    s1 = visible1 ? s1 * scale_ : -INFINITY;
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
      o_[t][k][h] *= shrink;
      o_[t][k][2 + h] *= shrink;
    }
  }

  const float scale_;  // sm_scale · log2(e)
  const int lane_, g_, c_;
  uint32_t q_[kHeadTiles][kHeadDim / 16][2];
  uint32_t weights_[kHeadTiles][2];
  float o_[kHeadTiles][kHeadDim / 16][4] = {};  // rows: dims 16 i + g (+8); columns: heads 2 c, 2 c + 1
  float m_[kHeadTiles][2], l_[kHeadTiles][2];
};

}  // namespace spl::kernels::cuda::decode_attention
