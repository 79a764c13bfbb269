// Bounds are brought up to date where keys were added. A warp does so for one granule after the other: lane l has
// dimensions 2 l, 2 l + 1, and those 64 further.
//
// Scores are products: max(q min, q max) = q- min + q+ max with q- = min(q, 0) and q+ = max(q, 0). So where q and the
// bounds are bf16, tensor cores multiply 16 granules of [min | max] with the [q- | q+] of eight query heads, each warp
// once (TensorKernel). Other types and widths are summed by plain loops (PlainKernel).
#include <cuda_bf16.h>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/selection/quest/page_bound_scores_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxPairs = 4;           // pairs of dimensions per lane: head_dim up to 256
constexpr int kGranulesPerBlock = 32;  // of PlainKernel: four a warp

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

// One stream of a step, of which granules of 16 positions are scored.
template <typename Kv>
struct Stream {
  using Keys = KeyRows<Kv>;
  using Bound = typename Keys::Bound;

  const Params& p;
  const int sequence, head;
  const Candidates own;
  const int32_t* const table;
  const int32_t* const compact;
  const int32_t num_granules, first_fresh;  // the first granule whose bounds change

  __device__ Stream(const Params& params, int stream)
      : p(params),
        sequence(stream / p.num_kv_heads),
        head(stream % p.num_kv_heads),
        own(p.selection.CandidatesOf(sequence, head, p.batch.kv_len[sequence])),
        table(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        compact(p.selection.CompactPages(sequence, head)),
        num_granules((own.count + kBoundTokens - 1) / kBoundTokens),
        first_fresh(FirstFresh(p.selection.steps[sequence])) {}

  __device__ static int32_t FirstFresh(const StagedStep& step) {
    return step.flags & StagedStep::kFirst ? 0 : step.compact_len / kBoundTokens;
  }
  __device__ int64_t page_bytes() const { return 2 * Keys::HalfBytes(p.head_dim); }
  __device__ Bound* BoundsOf(int32_t granule) const {
    return reinterpret_cast<Bound*>(p.batch.pool.base + compact[granule / Keys::kBounds] * page_bytes()) +
           int64_t{granule % Keys::kBounds} * 2 * p.head_dim;
  }

  // Writes the bounds of a granule. Called by a whole warp.
  __device__ void Update(int32_t granule, int lane) const {
    const int32_t begin = granule * kBoundTokens, num_keys = min(kBoundTokens, own.count - begin);
    // Where this lane's key of the granule is, two lanes a key; past the end the last one again.
    const int32_t position = own.Position(begin + min(lane % kBoundTokens, num_keys - 1));
    const int slot = position % kPageTokens;
    const std::byte* const pool = p.batch.pool.base;
    const int64_t page_at = table[position / kPageTokens] * page_bytes(),
                  key_at = page_at + slot * Keys::RowBytes(p.head_dim);
    const float factor = Keys::Factor(pool + page_at, slot, p.head_dim);
    Bound* const bounds = BoundsOf(granule);
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = 2 * (32 * i + lane);
      float2 low, high;
      Extremes<Kv>(pool, key_at, factor, c, p.head_dim, low, high);
      if (c >= p.head_dim) continue;
      StorePair(bounds + c, low);
      StorePair(bounds + p.head_dim + c, high);
    }
  }
};

template <typename Q, typename Kv>
__global__ void __launch_bounds__(32 * kWarps) PlainKernel(const __grid_constant__ Params p) {
  LetNextStart();
  WaitForPrevious();
  const Stream<Kv> stream(p, static_cast<int>(blockIdx.y));
  if (!p.selection.Selects(stream.sequence, stream.head)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Q* q =
      static_cast<const Q*>(p.q) + stream.sequence * p.q_row_stride + int64_t{stream.head} * p.group * p.head_dim;
  for (int32_t n = 0; n < kGranulesPerBlock / kWarps; ++n) {
    const int32_t granule = blockIdx.x * kGranulesPerBlock + n * kWarps + warp;
    if (granule >= stream.num_granules) return;
    if (granule >= stream.first_fresh) stream.Update(granule, lane);  // a lane reads what it has written
    const auto* bounds = stream.BoundsOf(granule);
    float2 low[kMaxPairs], high[kMaxPairs];
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = 2 * (32 * i + lane);
      if (c >= p.head_dim) continue;
      low[i] = LoadPair(bounds + c);
      high[i] = LoadPair(bounds + p.head_dim + c);
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
    if (lane == 0) p.scores[blockIdx.y * p.scores_stride + granule] = best;
  }
}

constexpr int kTile = 16;     // granules of a warp: the rows of an mma
constexpr int kHeadTile = 8;  // query heads: its columns

// Negative and positive parts of eight elements of q.
struct SignedParts {
  uint32_t low[4], high[4];

  __device__ explicit SignedParts(uint4 q) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    const __nv_bfloat162 zero = __floats2bfloat162_rn(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = *reinterpret_cast<const __nv_bfloat162*>(&words[i]);
      const __nv_bfloat162 negative = __hmin2(pair, zero), positive = __hmax2(pair, zero);
      low[i] = *reinterpret_cast<const uint32_t*>(&negative);
      high[i] = *reinterpret_cast<const uint32_t*>(&positive);
    }
  }
};

// sums += 16 granules of eight bounds a lane, times parts of q. The order of dimensions inside a product of the tensor
// cores is free, so that a lane has neighbours of both.
__device__ __forceinline__ void AddProducts(float (&sums)[4], const uint4& first, const uint4& second,
                                            const uint32_t (&q)[4]) {
  const uint32_t a[4] = {first.x, second.x, first.y, second.y}, b[4] = {first.z, second.z, first.w, second.w};
  Mma16816(sums, a, q[0], q[1]);
  Mma16816(sums, b, q[2], q[3]);
}

template <typename Kv, int kDim>
__global__ void __launch_bounds__(32 * kWarps) TensorKernel(const __grid_constant__ Params p) {
  constexpr int kSteps = kDim / 32;  // a lane has eight dimensions of 32
  LetNextStart();
  WaitForPrevious();
  const Stream<Kv> stream(p, static_cast<int>(blockIdx.y));
  if (!p.selection.Selects(stream.sequence, stream.head)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int32_t begin = (static_cast<int32_t>(blockIdx.x) * kWarps + warp) * kTile;
  const int32_t end = min(begin + kTile, stream.num_granules);
  if (begin >= end) return;
#pragma unroll 1
  for (int32_t granule = max(begin, stream.first_fresh); granule < end; ++granule) stream.Update(granule, lane);
  __syncwarp();
  // A tile lies in one page; rows past the last granule are whatever is there.
  const auto* bounds = reinterpret_cast<const uint4*>(stream.BoundsOf(begin)) + g * (kDim / 4) + c;
  uint4 low[kSteps][2], high[kSteps][2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      low[step][half] = bounds[half * 8 * (kDim / 4) + step * 4];
      high[step][half] = bounds[half * 8 * (kDim / 4) + kDim / 8 + step * 4];
    }
  }
  const auto* q =
      reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) + stream.sequence * p.q_row_stride) +
      int64_t{stream.head} * p.group * (kDim / 8) + c;
  float best[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
  for (int head = 0; head < p.group; head += kHeadTile) {
    float sums[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const SignedParts parts(head + g < p.group ? q[(head + g) * (kDim / 8) + step * 4] : uint4{0, 0, 0, 0});
      AddProducts(sums, low[step][0], low[step][1], parts.low);
      AddProducts(sums, high[step][0], high[step][1], parts.high);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // granule g + 8 (i / 2), head 2 c + i % 2
      if (head + 2 * c + i % 2 < p.group) best[i / 2] = fmaxf(best[i / 2], sums[i] * p.sm_scale);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float score = fmaxf(best[half], __shfl_xor_sync(0xffffffffu, best[half], 1));
    score = fmaxf(score, __shfl_xor_sync(0xffffffffu, score, 2));
    const int32_t granule = begin + g + half * 8;
    if (c == 0 && granule < end) p.scores[blockIdx.y * p.scores_stride + granule] = score;
  }
}

template <typename Kv>
cudaError_t LaunchTensor(const Params& p, int32_t granules, int streams, cudaStream_t stream) {
  const dim3 grid((granules + kTile * kWarps - 1) / (kTile * kWarps), streams);
  return p.head_dim == 128 ? LaunchEarly(TensorKernel<Kv, 128>, grid, 32 * kWarps, 0, stream, p)
                           : LaunchEarly(TensorKernel<Kv, 64>, grid, 32 * kWarps, 0, stream, p);
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
  const int streams = a.shape.num_kv_heads * batch.num_sequences;
  const bool aligned = reinterpret_cast<uintptr_t>(a.q.data) % 16 == 0 && a.q_row_stride % 8 == 0;
  if (a.q.dtype == DType::kBF16 && a.pool.dtype != DType::kF32 && aligned &&
      (a.shape.head_dim == 64 || a.shape.head_dim == 128)) {
    return a.pool.dtype == DType::kE4M3 ? LaunchTensor<E4M3>(p, granules, streams, stream)
                                        : LaunchTensor<__nv_bfloat16>(p, granules, streams, stream);
  }
  const dim3 grid((granules + kGranulesPerBlock - 1) / kGranulesPerBlock, streams);
  const auto kernel_for = [&](auto q) {
    using Q = decltype(q);
    if (a.pool.dtype == DType::kE4M3) return PlainKernel<Q, E4M3>;
    return a.pool.dtype == DType::kBF16 ? PlainKernel<Q, __nv_bfloat16> : PlainKernel<Q, float>;
  };
  const auto kernel = a.q.dtype == DType::kBF16 ? kernel_for(__nv_bfloat16{}) : kernel_for(float{});
  return LaunchEarly(kernel, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace spl::kernels::cuda
