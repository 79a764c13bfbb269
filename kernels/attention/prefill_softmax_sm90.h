// The softmax step of the wgmma prefill kernels, on one warpgroup's 64 x 128 score tile: thread (warp w, lane 4 g + c)
// holds rows 16 w + g and 16 w + g + 8, columns 8 i + 2 c and 8 i + 2 c + 1 of every 8-column block i.
// Included by .cu files only.
#pragma once

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {

inline constexpr int kTileKeys = 2 * kPageTokens;
inline constexpr int kPoolRowsPerPage = 2 * kPageTokens;  // rows of the pool, seen as a matrix, per page: K, then V

// How far above `m` a score may lie, in units of log2, before the sums are scaled anew: weights stay below 2^8, which
// bf16 and f32 sums hold as exactly as those below 1. FlashAttention-4 does the same.
inline constexpr float kHeadroom = 8;

// Turns scores into weights in place; `shrink` is the factor by which earlier sums must be multiplied, 1 nearly always.
// m: what scores are weighed against, in units of log2: their maximum, less at most kHeadroom; -infinity while nothing
// has been seen (l is 0 then).
struct RowState {
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {0, 0};  // this thread's columns only
};
__device__ inline void Softmax(float (&s)[64], float scale, RowState& state, float (&shrink)[2]) {
  // Four maxima a row: one chain of 32 would take longer than the tensor cores leave.
  float maxima[2][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float pair = fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
      maxima[r][i % 4] = i < 4 ? pair : fmaxf(maxima[r][i % 4], pair);
    }
  }
  float max[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) max[r] = fmaxf(fmaxf(maxima[r][0], maxima[r][1]), fmaxf(maxima[r][2], maxima[r][3]));
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffffu, max[r], lanes));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float highest = __fmul_rn(max[r], scale);
    const float m = highest > state.m[r] + kHeadroom ? highest : state.m[r];
    const float base = m == -INFINITY ? 0.0f : m;
    shrink[r] = Exp2(state.m[r] - base);
    state.m[r] = m;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        s[4 * i + e] = Exp2(__fmaf_rn(s[4 * i + e], scale, -base));
        sum += s[4 * i + e];
      }
    }
    state.l[r] = __fmaf_rn(state.l[r], shrink[r], sum);
  }
}

__device__ inline void PackWeights(const float (&s)[64], uint32_t (&p)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = PackBf16(s[2 * i], s[2 * i + 1]);
}

}  // namespace spl::kernels::cuda
