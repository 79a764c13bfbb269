// A warp takes granules of one stream one after the other: it brings the bounds up to date where keys were added, then
// reads them once for all query heads of the group. Lane l has dimensions l, l + 32, ... as pairs.
#include <cuda_bf16.h>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/quest/page_bound_scores_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxPairs = 4;           // pairs of dimensions per lane: head_dim up to 256
constexpr int kGranulesPerBlock = 32;  // four a warp

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const void* q;
  int64_t q_row_stride;
  float* scores;
  int64_t scores_stride;
  int32_t num_kv_heads, group, head_dim;
  float sm_scale;
};

__device__ __forceinline__ float2 LoadPair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 LoadPair(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ __forceinline__ void StorePair(float* p, float2 x) { *reinterpret_cast<float2*>(p) = x; }
__device__ __forceinline__ void StorePair(__nv_bfloat16* p, float2 x) {  // exact: the values came from there
  *reinterpret_cast<__nv_bfloat162*>(p) = __float22bfloat162_rn(x);
}

template <typename Q, typename Kv>
__global__ void __launch_bounds__(32 * kWarps) BoundsKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const int stream = blockIdx.y, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const StagedStep step = p.selection.steps[sequence];
  const int32_t kv_len = p.batch.kv_len[sequence];
  WaitForPrevious();
  if (!p.selection.Selects(sequence, head)) return;
  const Candidates own = p.selection.CandidatesOf(sequence, head, kv_len);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;
  const int32_t* compact = p.selection.CompactPages(sequence, head);
  Kv* pool = reinterpret_cast<Kv*>(p.batch.pool.base);
  const int64_t page_elements = int64_t{2} * kPageTokens * p.head_dim;
  const Q* q = static_cast<const Q*>(p.q) + sequence * p.q_row_stride + int64_t{head} * p.group * p.head_dim;
  const int32_t fresh = step.flags & StagedStep::kFirst ? 0 : step.compact_len;
  const int32_t num_granules = (own.count + kBoundTokens - 1) / kBoundTokens;
  for (int32_t n = 0; n < kGranulesPerBlock / kWarps; ++n) {
    const int32_t granule = blockIdx.x * kGranulesPerBlock + n * kWarps + warp;
    if (granule >= num_granules) return;
    Kv* bounds =
        pool + compact[granule / kBoundsPerPage] * page_elements + int64_t{granule % kBoundsPerPage} * 2 * p.head_dim;
    float2 low[kMaxPairs], high[kMaxPairs];
    if ((granule + 1) * kBoundTokens > fresh) {
      const int32_t begin = granule * kBoundTokens, num_keys = min(kBoundTokens, own.count - begin);
      // Where this lane's key of the granule is, two lanes a key; past the end the last one again.
      const int32_t position = own.Position(begin + min(lane % kBoundTokens, num_keys - 1));
      const int64_t key_at =
          table[position / kPageTokens] * page_elements + int64_t{position % kPageTokens} * p.head_dim;
#pragma unroll
      for (int i = 0; i < kMaxPairs; ++i) {
        const int c = 2 * (32 * i + lane);
        float2 x16[kBoundTokens];  // all loads in flight at once
#pragma unroll
        for (int j = 0; j < kBoundTokens; ++j) {
          const Kv* const key = pool + __shfl_sync(0xffffffffu, key_at, j);
          if (c < p.head_dim) x16[j] = LoadPair(key + c);
        }
        if (c >= p.head_dim) continue;
        low[i] = high[i] = x16[0];
#pragma unroll
        for (int j = 1; j < kBoundTokens; ++j) {
          const float2 x = x16[j];
          low[i] = float2{x.x < low[i].x ? x.x : low[i].x, x.y < low[i].y ? x.y : low[i].y};
          high[i] = float2{x.x > high[i].x ? x.x : high[i].x, x.y > high[i].y ? x.y : high[i].y};
        }
        StorePair(bounds + c, low[i]);
        StorePair(bounds + p.head_dim + c, high[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMaxPairs; ++i) {
        const int c = 2 * (32 * i + lane);
        if (c >= p.head_dim) continue;
        low[i] = LoadPair(bounds + c);
        high[i] = LoadPair(bounds + p.head_dim + c);
      }
    }
    float best = -INFINITY;
    for (int h = 0; h < p.group; ++h) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kMaxPairs; ++i) {
        const int c = 2 * (32 * i + lane);
        if (c >= p.head_dim) continue;
        const float2 x = LoadPair(q + int64_t{h} * p.head_dim + c);
        sum += fmaxf(x.x * low[i].x, x.x * high[i].x) + fmaxf(x.y * low[i].y, x.y * high[i].y);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      best = fmaxf(best, sum * p.sm_scale);
    }
    if (lane == 0) p.scores[stream * p.scores_stride + granule] = best;
  }
}

}  // namespace

cudaError_t PageBoundScores(const PageBoundScoresArgs& a, const PagedBatch& batch, const SelectionBatch& selection,
                            int32_t max_kv_len, cudaStream_t stream) {
  if (batch.num_sequences == 0) return cudaSuccess;
  if (a.shape.head_dim > 64 * kMaxPairs) return cudaErrorNotSupported;
  const Params p{batch,
                 selection,
                 a.q.data,
                 a.q_row_stride,
                 a.scores,
                 a.scores_stride,
                 a.shape.num_kv_heads,
                 a.shape.num_qo_heads / a.shape.num_kv_heads,
                 a.shape.head_dim,
                 a.shape.sm_scale};
  const int32_t granules = (max_kv_len + kBoundTokens - 1) / kBoundTokens;
  const dim3 grid((granules + kGranulesPerBlock - 1) / kGranulesPerBlock, a.shape.num_kv_heads * batch.num_sequences);
  const bool bf16_q = a.q.dtype == DType::kBF16, bf16_kv = a.pool.dtype == DType::kBF16;
  const auto kernel = bf16_q
                          ? (bf16_kv ? BoundsKernel<__nv_bfloat16, __nv_bfloat16> : BoundsKernel<__nv_bfloat16, float>)
                          : (bf16_kv ? BoundsKernel<float, __nv_bfloat16> : BoundsKernel<float, float>);
  return LaunchEarly(kernel, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace spl::kernels::cuda
