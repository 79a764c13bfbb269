// A warp takes granules of one stream one after the other: it brings the bounds up to date where keys were added, then
// reads them once for all query heads of the group. Lane l has dimensions l, l + 32, ... as pairs.
#include <cuda_bf16.h>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/e4m3_cuda.h"
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

// Keys in their pages. Bounds have their type, or that of derived keys in a pool of codes.
template <typename Kv>
struct KeyRows {
  using Bound = Kv;
  static constexpr int kBounds = BoundsPerPage(DType::kBF16);
  static constexpr bool kHasFactor = false;
  __device__ static constexpr int64_t RowBytes(int d) { return d * static_cast<int64_t>(sizeof(Kv)); }
  __device__ static constexpr int64_t HalfBytes(int d) { return kPageTokens * RowBytes(d); }
  __device__ __forceinline__ static float Factor(const std::byte*, int, int) { return 1; }
  __device__ __forceinline__ static float2 Pair(const std::byte* row, int c, float) {
    return LoadPair(reinterpret_cast<const Kv*>(row) + c);
  }
};
struct E4M3 {};
template <>
struct KeyRows<E4M3> {
  using Bound = __nv_bfloat16;
  static constexpr int kBounds = BoundsPerPage(DType::kE4M3);
  static constexpr bool kHasFactor = true;
  __device__ static constexpr int64_t RowBytes(int d) { return d; }
  __device__ static constexpr int64_t HalfBytes(int d) { return int64_t{kPageTokens} * (d + 1); }
  __device__ __forceinline__ static float Factor(const std::byte* half, int slot, int d) {
    return RowScaleFloat(static_cast<uint32_t>(half[kPageTokens * d + slot]));
  }
  __device__ __forceinline__ static float2 Pair(const std::byte* row, int c, float factor) {
    const uint32_t codes = *reinterpret_cast<const unsigned short*>(row + c);
    return {E4M3Float(codes & 0xff) * factor, E4M3Float(codes >> 8) * factor};
  }
};

// The smallest and the largest of elements c and c + 1 of 16 keys, where c < d. Lane j has where key j is, and the
// factor of its row; called by all lanes.
template <typename Kv>
__device__ __forceinline__ void Extremes(const std::byte* pool, int64_t key_at, float factor, int c, int d, float2& low,
                                         float2& high) {
  float2 x16[kBoundTokens];  // all loads in flight at once
#pragma unroll
  for (int j = 0; j < kBoundTokens; ++j) {
    const std::byte* const key = pool + __shfl_sync(0xffffffffu, key_at, j);
    float key_factor = 1;
    if constexpr (KeyRows<Kv>::kHasFactor) key_factor = __shfl_sync(0xffffffffu, factor, j);
    if (c < d) x16[j] = KeyRows<Kv>::Pair(key, c, key_factor);
  }
  if (c >= d) return;
  low = high = x16[0];
#pragma unroll
  for (int j = 1; j < kBoundTokens; ++j) {
    const float2 x = x16[j];
    low = float2{x.x < low.x ? x.x : low.x, x.y < low.y ? x.y : low.y};
    high = float2{x.x > high.x ? x.x : high.x, x.y > high.y ? x.y : high.y};
  }
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
  using Keys = KeyRows<Kv>;
  using Bound = typename Keys::Bound;
  constexpr int kPerPage = Keys::kBounds;
  std::byte* const pool = p.batch.pool.base;
  const int64_t page_bytes = 2 * Keys::HalfBytes(p.head_dim);
  const Q* q = static_cast<const Q*>(p.q) + sequence * p.q_row_stride + int64_t{head} * p.group * p.head_dim;
  const int32_t fresh = step.flags & StagedStep::kFirst ? 0 : step.compact_len;
  const int32_t num_granules = (own.count + kBoundTokens - 1) / kBoundTokens;
  for (int32_t n = 0; n < kGranulesPerBlock / kWarps; ++n) {
    const int32_t granule = blockIdx.x * kGranulesPerBlock + n * kWarps + warp;
    if (granule >= num_granules) return;
    Bound* bounds = reinterpret_cast<Bound*>(pool + compact[granule / kPerPage] * page_bytes) +
                    int64_t{granule % kPerPage} * 2 * p.head_dim;
    float2 low[kMaxPairs], high[kMaxPairs];
    if ((granule + 1) * kBoundTokens > fresh) {
      const int32_t begin = granule * kBoundTokens, num_keys = min(kBoundTokens, own.count - begin);
      // Where this lane's key of the granule is, two lanes a key; past the end the last one again.
      const int32_t position = own.Position(begin + min(lane % kBoundTokens, num_keys - 1));
      const int slot = position % kPageTokens;
      const int64_t page_at = table[position / kPageTokens] * page_bytes,
                    key_at = page_at + slot * Keys::RowBytes(p.head_dim);
      const float factor = Keys::Factor(pool + page_at, slot, p.head_dim);
#pragma unroll
      for (int i = 0; i < kMaxPairs; ++i) {
        const int c = 2 * (32 * i + lane);
        Extremes<Kv>(pool, key_at, factor, c, p.head_dim, low[i], high[i]);
        if (c >= p.head_dim) continue;
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
  const auto kernel_for = [&](auto q) {
    using Q = decltype(q);
    if (a.pool.dtype == DType::kE4M3) return BoundsKernel<Q, E4M3>;
    return a.pool.dtype == DType::kBF16 ? BoundsKernel<Q, __nv_bfloat16> : BoundsKernel<Q, float>;
  };
  const auto kernel = a.q.dtype == DType::kBF16 ? kernel_for(__nv_bfloat16{}) : kernel_for(float{});
  return LaunchEarly(kernel, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace spl::kernels::cuda
