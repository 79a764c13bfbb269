// The sums over warps, splits and groups of splits in decode_attention_cuda.cu, always in ascending order: the same
// bits whatever the timing. A thread owns four dims of a query head.
#pragma once

#include "kernels/attention/decode_splits_cuda.h"

namespace spl::kernels::cuda::decode_attention {

// Partial results of a sum over splits or groups that one thread has in flight.
inline constexpr int kPartsAtOnce = 16;

// Adds up the warps of a CTA. max_sum: of each warp's query heads; smem: their outputs, kRingBytes from one warp to the
// next, kMergeStride floats from one head to the next. Calls done(row, quad, x, max, sum).
template <int kHeadDim, int kRingBytes, int kMergeStride, int kHeads, typename Done>
__device__ __forceinline__ void AddWarps(const Params& p, const float2 (&max_sum)[kWarps][kHeads], const char* smem,
                                         const Done& done) {
  constexpr int kQuads = kHeadDim / 4;
  for (int at = threadIdx.x; at < p.group * kQuads; at += kThreads) {
    const int row = at / kQuads, quad = at % kQuads;
    float max = max_sum[0][row].x;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, max_sum[w][row].x);
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0;
    float4 x{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = Exp2(max_sum[w][row].x - base);
      sum += weight * max_sum[w][row].y;
      const float4 y =
          *reinterpret_cast<const float4*>(smem + w * kRingBytes + (row * kMergeStride + 4 * quad) * sizeof(float));
      x = float4{x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w};
    }
    done(row, quad, x, max, sum);
  }
}

// True in the CTA that arrives last of n; the counter is back at zero then, and the writes of the others are visible.
// is_last: shared memory.
__device__ __forceinline__ bool ArrivesLast(unsigned* counter, int n, bool& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // cumulative: covers what the barrier ordered before it
    is_last = atomicInc(counter, n - 1) == static_cast<unsigned>(n) - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Adds up n_parts results. smem: smem_bytes for their maxima and sums. Calls done(row, quad, x, max, sum).
template <int kHeadDim, typename Done>
__device__ __forceinline__ void AddParts(const Params& p, const float4* parts, const float2* max_sums, int n_parts,
                                         char* smem, int smem_bytes, const Done& done) {
  constexpr int kQuads = kHeadDim / 4;
  auto* some = reinterpret_cast<float2*>(smem);
  const int at_once = smem_bytes / static_cast<int>(sizeof(float2)) / p.group;
  for (int first = 0; first < p.group * kQuads; first += kThreads) {
    const int at = min(first + static_cast<int>(threadIdx.x), p.group * kQuads - 1);
    const int row = at / kQuads, quad = at % kQuads;
    float max = -INFINITY, sum = 0;
    float4 x{0, 0, 0, 0};
    for (int begin = 0; begin < n_parts; begin += at_once) {
      const int n = min(at_once, n_parts - begin);
      float4 y[kPartsAtOnce];
      const auto load = [&](int i) {
#pragma unroll
        for (int k = 0; k < kPartsAtOnce; ++k) {
          if (i + k < n) y[k] = __ldcg(&parts[(static_cast<int64_t>(begin + i + k) * p.group + row) * kQuads + quad]);
        }
      };
      load(0);
      __syncthreads();
      for (int i = threadIdx.x; i < n * p.group; i += kThreads) {
        some[i] = __ldcg(&max_sums[static_cast<int64_t>(begin) * p.group + i]);
      }
      __syncthreads();
      float next = max;
      for (int i = 0; i < n; ++i) next = fmaxf(next, some[i * p.group + row].x);
      const float base = next == -INFINITY ? 0.0f : next;
      const float shrink = Exp2(max - base);
      max = next;
      sum *= shrink;
      x = float4{x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
      for (int i = 0; i < n; i += kPartsAtOnce) {
        if (i > 0) load(i);
#pragma unroll
        for (int k = 0; k < kPartsAtOnce; ++k) {
          if (i + k < n) {
            const float2 ms = some[(i + k) * p.group + row];
            const float weight = Exp2(ms.x - base);
            sum += weight * ms.y;
            x = float4{x.x + weight * y[k].x, x.y + weight * y[k].y, x.z + weight * y[k].z, x.w + weight * y[k].w};
          }
        }
      }
    }
    if (first + static_cast<int>(threadIdx.x) < p.group * kQuads) done(row, quad, x, max, sum);
  }
}

}  // namespace spl::kernels::cuda::decode_attention
