// Attention over rows of K and V that a cluster has dealt among its warps, for all query heads of a KV head. Included
// by .cu files only.
//
// The list is cut into kParts parts whatever the size of the cluster: a part is a warp's running softmax, and the parts
// are added up in one binary tree. Exponentials count from maxima that are rounded up to whole powers of two, so that
// changing from one to the other is exact, and the bits do not follow from how blocks divide the parts. Outputs are
// divided by the sum of the rounded weights that the products take: the largest weight is not 1 here, and its rounding
// would not cancel.
//
// Rows go from memory straight to the registers of mma m16n8k16, whose rows and dimensions may be any as long as its
// results are taken to be theirs: a lane reads 16 bytes of a key at a time, and 16 bytes of four values whose halves it
// pairs.
#pragma once

#include "kernels/common/kv_pool.h"
#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/e4m3_cuda.h"

namespace spl::kernels::cuda::listed_rows {

inline constexpr int kParts = 128;
inline constexpr int kRowsAtOnce = 16;
inline constexpr float kNothing = -1e30f;  // maximum of a part without rows; finite, so that differences are

// Entries of a part; `count` entries in all.
__host__ __device__ constexpr int PartEntries(int count) {
  return (count + kParts * kRowsAtOnce - 1) / (kParts * kRowsAtOnce) * kRowsAtOnce;
}

// Bytes of a block's results. kHeads: rows for query heads.
template <int kBlocks, int kHeads, int kDim>
struct Results {
  static constexpr int kNumHeads = kHeads, kOwn = kParts / kBlocks;  // parts of a block
  static constexpr int kStride = kDim + 8;                           // floats; keeps the four lanes of a quad apart
  float outs[kOwn][kHeads][kStride];                                 // one for each part
  float2 max_sums[kOwn][kHeads];                                     // maximum, rounded up, and sum of rounded weights
  float exact_sums[kOwn][kHeads];                                    // sum of weights

  static constexpr int kNum = kOwn;
  __device__ __forceinline__ float out(int i, int head, int dim) const { return outs[i][head][dim]; }
  __device__ __forceinline__ float2 max_sum(int i, int head) const { return max_sums[i][head]; }
  __device__ __forceinline__ float exact(int i, int head) const { return exact_sums[i][head]; }
};
// The same of each block of the cluster, told by it. Must lie where the block keeps nothing else: others are faster.
template <int kBlocks, int kHeads, int kDim>
struct TheirResults {
  float2 of_block[kBlocks][kHeads];
  float exact[kBlocks][kHeads];
  float share[kBlocks][kHeads * kDim / kBlocks];  // every block's sums of the elements that this block writes
};

// A warp's softmax over one part, but for the reading of rows.
template <int kDim>
class PartSums {
 public:
  __device__ __forceinline__ explicit PartSums(float scale)
      : scale_(scale), g_(static_cast<int>(threadIdx.x) % 32 / 4), c_(static_cast<int>(threadIdx.x) % 4) {}

  __device__ __forceinline__ void Clear() {
    max_[0] = max_[1] = kNothing;
    sum_[0] = sum_[1] = exact_[0] = exact_[1] = 0;
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[t][i] = 0;
    }
  }

 protected:
  // dim(t): the first of the two dims that a lane has of block t.
  template <typename ResultsT, typename Dim>
  __device__ __forceinline__ void Store(ResultsT& r, int part, const Dim& dim) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = OverRows(sum_[h]), exact = OverRows(exact_[h]);
      const int head = 2 * c_ + h;
      if (head >= ResultsT::kNumHeads) continue;
      if (g_ == 0) r.max_sums[part][head] = float2{max_[h], sum}, r.exact_sums[part][head] = exact;
#pragma unroll
      for (int t = 0; t < kDim / 16; ++t)
        *reinterpret_cast<float2*>(&r.outs[part][head][dim(t)]) = float2{o_[t][h], o_[t][2 + h]};
    }
  }
  // Scores of rows g and g + 8 become weights of two heads, as pairs of bf16. Their sums are sums of rounded weights.
  __device__ __forceinline__ void WeighRows(float (&s)[4], int count, uint32_t& first, uint32_t& second) {
    Weigh(0, s[0], s[2], count);
    Weigh(1, s[1], s[3], count);
    first = PackBf16(s[0], s[1]), second = PackBf16(s[2], s[3]);
    sum_[0] += __uint_as_float(first << 16) + __uint_as_float(second << 16);  // this lane's rows only
    sum_[1] += __uint_as_float(first & 0xffff0000u) + __uint_as_float(second & 0xffff0000u);
  }

  static __device__ __forceinline__ float OverRows(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
  }
  // Scores of one query head become weights; what was added up before shrinks to the new maximum.
  __device__ __forceinline__ void Weigh(int h, float& s0, float& s1, int count) {
    s0 = g_ < count ? s0 * scale_ : -INFINITY;
    s1 = g_ + 8 < count ? s1 * scale_ : -INFINITY;
    float max = fmaxf(s0, s1);
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
    max = fmaxf(ceilf(max), max_[h]);
    if (max != max_[h]) {
      const float shrink = Exp2(max_[h] - max);
      max_[h] = max;
      sum_[h] *= shrink;
      exact_[h] *= shrink;
#pragma unroll
      for (int t = 0; t < kDim / 16; ++t) {
        o_[t][h] *= shrink;
        o_[t][2 + h] *= shrink;
      }
    }
    s0 = Exp2(s0 - max);
    s1 = Exp2(s1 - max);
    exact_[h] += s0 + s1;
  }

  const float scale_;  // sm_scale · log2(e)
  const int g_, c_;
  uint32_t q_[kDim / 16][2];
  float o_[kDim / 16][4];  // rows: two dimensions of a lane's 16 bytes; columns: heads 2 c, 2 c + 1
  float max_[2], sum_[2], exact_[2];
};

// Rows of bf16.
template <int kDim>
class WideSoftmax : public PartSums<kDim> {
  using Base = PartSums<kDim>;
  using Base::c_, Base::g_, Base::o_, Base::q_;

 public:
  using Base::Base;

  // q [group, kDim] bf16.
  __device__ __forceinline__ void TakeQueries(const __nv_bfloat16* q, int group) {
    const bool exists = g_ < group;
    const auto* row = reinterpret_cast<const uint4*>(q + (exists ? g_ : 0) * kDim);
#pragma unroll
    for (int u = 0; u < kDim / 32; ++u) {
      const uint4 x = row[4 * u + c_];
      q_[2 * u][0] = exists ? x.x : 0, q_[2 * u][1] = exists ? x.y : 0;
      q_[2 * u + 1][0] = exists ? x.z : 0, q_[2 * u + 1][1] = exists ? x.w : 0;
    }
  }

  // Up to 16 rows: rows[i] counts rows of kDim elements from `pool`; V lies 64 rows behind K. count is at least 1.
  __device__ __forceinline__ void Add(const std::byte* pool, const int32_t* rows, int count) {
    const auto at = [&](int i) {
      return reinterpret_cast<const uint4*>(pool + int64_t{rows[min(i, count - 1)]} * (2 * kDim));
    };
    uint4 k[2][kDim / 32];
    {
      const uint4 *first = at(g_), *second = at(g_ + 8);
#pragma unroll
      for (int u = 0; u < kDim / 32; ++u) {
        k[0][u] = __ldcg(first + 4 * u + c_);
        k[1][u] = __ldcg(second + 4 * u + c_);
      }
    }
    float s[4];
    Score(k, s);
    constexpr int64_t kValues = int64_t{kPageTokens} * kDim / 8;  // 16-byte pieces from K to V
    uint4 v[4][kDim / 64];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4* row = at(2 * c_ + (i & 1) + (i & 2) * 4) + kValues;
#pragma unroll
      for (int u = 0; u < kDim / 64; ++u) v[i][u] = __ldcg(row + 8 * u + g_);
    }
    uint32_t first, second;
    this->WeighRows(s, count, first, second);
    const uint32_t w0 = TransposeMatrix(first), w1 = TransposeMatrix(second);
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
      const auto word = [&](int i) {
        const uint4& x = v[i][t / 4];
        return t % 4 == 0 ? x.x : t % 4 == 1 ? x.y : t % 4 == 2 ? x.z : x.w;
      };
      const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                             __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
      Mma16816(o_[t], a, w0, w1);
    }
  }

  template <typename ResultsT>
  __device__ __forceinline__ void Store(ResultsT& r, int part) const {
    Base::Store(r, part, [this](int t) { return 64 * (t / 4) + 8 * g_ + 2 * (t % 4); });
  }

 protected:
  // k: of rows g and g + 8, the c-th 16 bytes of every 64; s: products with two heads, as the mma leaves them.
  __device__ __forceinline__ void Score(const uint4 (&k)[2][kDim / 32], float (&s)[4]) const {
    float chains[2][4] = {};
#pragma unroll
    for (int u = 0; u < kDim / 32; ++u) {
      const uint32_t a[4] = {k[0][u].x, k[1][u].x, k[0][u].y, k[1][u].y};
      const uint32_t b[4] = {k[0][u].z, k[1][u].z, k[0][u].w, k[1][u].w};
      Mma16816(chains[0], a, q_[2 * u][0], q_[2 * u][1]);
      Mma16816(chains[1], b, q_[2 * u + 1][0], q_[2 * u + 1][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = chains[0][i] + chains[1][i];
  }
};

// Rows of e4m3. As in decode_softmax_cuda.h codes become bf16 of 2^-120 times their value, and the scales of rows are
// applied to scores and weights, where they are exact.
template <int kDim>
class CodeSoftmax : public PartSums<kDim> {
  using Base = PartSums<kDim>;
  using Base::c_, Base::g_, Base::o_, Base::q_;
  static constexpr int64_t kScalesAt = int64_t{kPageTokens} * kDim, kHalfBytes = kScalesAt + kPageTokens;
  static constexpr int kLaneWords = kDim / 32;  // a lane's part of a value

 public:
  using Base::Base;

  __device__ __forceinline__ void TakeQueries(const __nv_bfloat16* q, int group) {
    const bool exists = g_ < group;
    const auto* row = reinterpret_cast<const uint2*>(q + (exists ? g_ : 0) * kDim);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint2 dims = row[16 * (k / 4) + 4 * c_ + k % 4];
      q_[k][0] = exists ? dims.x : 0, q_[k][1] = exists ? dims.y : 0;
    }
  }

  // As in WideSoftmax.
  __device__ __forceinline__ void Add(const std::byte* pool, const int32_t* rows, int count) {
    struct Place {
      const std::byte* half;
      int slot;
      __device__ __forceinline__ uint32_t Scale(int is_v) const {
        return __ldcg(reinterpret_cast<const unsigned char*>(half + is_v * kHalfBytes + kScalesAt + slot));
      }
    };
    const auto at = [&](int i) {
      const int32_t row = rows[min(i, count - 1)];
      return Place{pool + int64_t{row / (2 * kPageTokens)} * 2 * kHalfBytes, row % (2 * kPageTokens)};
    };
    const Place own[2] = {at(g_), at(g_ + 8)};
    uint4 k[2][kDim / 64];
    uint32_t k_scale[2], v_scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* row = reinterpret_cast<const uint4*>(own[i].half + own[i].slot * kDim);
#pragma unroll
      for (int u = 0; u < kDim / 64; ++u) k[i][u] = __ldcg(row + 4 * u + c_);
      k_scale[i] = own[i].Scale(0), v_scale[i] = own[i].Scale(1);
    }
    uint32_t v[4][kLaneWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Place place = at(2 * c_ + (i & 1) + (i & 2) * 4);
      const std::byte* lane_codes = place.half + kHalfBytes + place.slot * kDim + g_ * (kDim / 8);
      if constexpr (kDim == 128) {
        const uint4 x = __ldcg(reinterpret_cast<const uint4*>(lane_codes));
        v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w;
      } else {
        const uint2 x = __ldcg(reinterpret_cast<const uint2*>(lane_codes));
        v[i][0] = x.x, v[i][1] = x.y;
      }
    }
    float s[2][4] = {};  // two chains of products
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      const auto word = [&](int i) {
        const uint4& x = k[i][n / 4];
        return n % 4 == 0 ? x.x : n % 4 == 1 ? x.y : n % 4 == 2 ? x.z : x.w;
      };
      const uint2 near = SmallBf16Quad(word(0)), far = SmallBf16Quad(word(1));
      const uint32_t a[4] = {near.x, far.x, near.y, far.y};
      Mma16816(s[n % 2], a, q_[n][0], q_[n][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = (s[0][i] + s[1][i]) * SmallFactor(k_scale[i / 2]);
    uint32_t first, second;
    this->WeighRows(s[0], count, first, second);
    const uint32_t w0 = TransposeMatrix(TimesRowFactor(first, RowFactor(v_scale[0]))),
                   w1 = TransposeMatrix(TimesRowFactor(second, RowFactor(v_scale[1])));
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
      const uint32_t low = t % 2 == 0 ? 0x4000 : 0x6020, high = t % 2 == 0 ? 0x5010 : 0x7030;
      const int n = t / 2;
      const uint32_t a[4] = {
          SmallBf16Pair(__byte_perm(v[0][n], v[1][n], low)), SmallBf16Pair(__byte_perm(v[0][n], v[1][n], high)),
          SmallBf16Pair(__byte_perm(v[2][n], v[3][n], low)), SmallBf16Pair(__byte_perm(v[2][n], v[3][n], high))};
      Mma16816(o_[t], a, w0, w1);
    }
  }

  template <typename ResultsT>
  __device__ __forceinline__ void Store(ResultsT& r, int part) const {
    Base::Store(r, part, [this](int t) { return kDim / 8 * g_ + 2 * t; });
  }
};

// Pages as the kernel reads them.
template <int kHeadDim>
struct WidePages {
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int64_t kHalfBytes = int64_t{kPageTokens} * kRowBytes;
  using Softmax = WideSoftmax<kDim>;
};
template <int kHeadDim>
struct CodePages {
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowBytes = kDim;
  static constexpr int64_t kHalfBytes = int64_t{kPageTokens} * (kDim + 1);
  using Softmax = CodeSoftmax<kDim>;
};

}  // namespace spl::kernels::cuda::listed_rows
