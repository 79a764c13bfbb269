// Scores a choice in two passes over K. The first finds each query's maximum and sum for every split of the keys; the
// last block of a stream joins the splits. The second adds up the weights that the queries give to a key. It goes
// through the keys backwards, because the last ones read are still in the second-level cache. The splits depend on
// kv_len alone and all sums have a fixed order: a stream's scores are the same bits in every batch and recording.
//
// Products by mma m16n8k16, 16 queries against 8 keys over 16 dimensions. A lane loads 16 bytes of a key's row, 8
// dimensions, and pairs words 0 and 1, then 2 and 3, for two products: the dimensions of a product may be any as long
// as both sides take the same ones, so that keys go from memory into the registers of a product without shared memory
// or a move in between. Queries, which all warps share, lie in shared memory.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/selection/loopserve/query_window_stream_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"

namespace spl::kernels::cuda {
namespace {

using namespace query_window;  // NOLINT: the parts of this kernel

// One block a stream: this step's queries take the place of the oldest; without a choice the last position joins.
__global__ void __launch_bounds__(kThreads) RecordKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const Stream s(p, static_cast<int>(blockIdx.x));
  WaitForPrevious();
  if (!s.has(StagedStep::kRecords) || s.compact[0] == kNoPage) return;
  const int t = static_cast<int>(threadIdx.x);
  const int words = p.head_dim * p.query_bytes / 4;  // words per row
  const auto* q = static_cast<const std::byte*>(p.q) +
                  (s.sequence * p.q_row_stride + static_cast<int64_t>(s.head) * p.group * p.head_dim) * p.query_bytes;
  for (int i = t; i < p.group * words; i += kThreads) {
    const int slot = s.step.compact_len % p.window;
    auto* row = reinterpret_cast<uint32_t*>(const_cast<std::byte*>(s.query(p, slot * p.group + i / words)));
    row[i % words] = reinterpret_cast<const uint32_t*>(q)[i];
  }
  if (!s.has(StagedStep::kSelects) || s.has(StagedStep::kRefresh)) return;
  int32_t* tokens = p.tokens + static_cast<int64_t>(blockIdx.x) * p.list_stride;
  const int32_t count = min(Entry(p, s.compact, 0), static_cast<int32_t>(p.list_stride) - 1);
  for (int32_t k = t; k < count; k += kThreads) tokens[k] = Entry(p, s.compact, 1 + k);
  __syncthreads();  // everybody has read how many there were
  if (t == 0) {
    tokens[count] = Entry(p, s.compact, 1 + count) = s.kv_len - 1;
    Entry(p, s.compact, 0) = count + 1;
    p.counts[blockIdx.x] = count + 1;
  }
}

// One block per stream: keeps the chosen positions for the steps that join.
__global__ void __launch_bounds__(kThreads) KeepKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const Stream s(p, static_cast<int>(blockIdx.x));
  WaitForPrevious();
  if (!s.has(StagedStep::kRecords | StagedStep::kSelects | StagedStep::kRefresh) || s.compact[0] == kNoPage) return;
  const int32_t count = p.counts[blockIdx.x];
  const int32_t* tokens = p.tokens + static_cast<int64_t>(blockIdx.x) * p.list_stride;
  for (int32_t k = static_cast<int32_t>(threadIdx.x); k < count; k += kThreads) Entry(p, s.compact, 1 + k) = tokens[k];
  if (threadIdx.x == 0) Entry(p, s.compact, 0) = count;
}

// A query's maximum and sum over some keys.
struct Stats {
  float max = kLowest, sum = 0;
  __device__ __forceinline__ void Add(const Stats& other) {
    const float most = fmaxf(max, other.max);
    sum = sum * Exp2(max - most) + other.sum * Exp2(other.max - most);
    max = most;
  }
  __device__ __forceinline__ void AddLanes(int from, int to) {
    for (int offset = from; offset < to; offset *= 2)
      Add({__shfl_xor_sync(0xffffffffu, max, offset), __shfl_xor_sync(0xffffffffu, sum, offset)});
  }
};

// By all threads, once the block's parts are written: the last one of `num_blocks` blocks of the stream puts all splits
// together, and leaves the counter zero for the next launch.
template <int kBlockThreads>
__device__ __forceinline__ void CombineSplits(const Params& p, const Stream& s, int stream, int num_blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.arrived[stream], 1u) + 1 == static_cast<uint32_t>(num_blocks);
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int splits = s.num_splits(), lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < p.rows; row += kBlockThreads / 32) {
    const int64_t at = static_cast<int64_t>(stream) * p.rows + row;
    Stats all;
    if (lane < splits) {
      const float2 x = __ldcg(p.parts + at * kMaxSplits + lane);
      all = {x.x, x.y};
    }
    all.AddLanes(1, 32);
    // A query that is not there pays nothing.
    if (lane == 0) p.lse[at] = s.sees(p, row) > 0 ? all.max + log2f(all.sum) : INFINITY;
  }
  if (threadIdx.x == 0) p.arrived[stream] = 0;
}

// ---- any shape ------------------------------------------------------------------------------------------------------
// Kv is uint8_t for pages of codes.
template <typename Q, typename Kv>
__device__ __forceinline__ float Score(const Params& p, const Stream& s, const Q* q, int j) {
  float dot = 0;
  if constexpr (std::is_same_v<Kv, uint8_t>) {
    const int64_t row = s.KeyRow(j);
    const int slot = static_cast<int>(row % (2 * kPageTokens));
    const auto* half = reinterpret_cast<const uint8_t*>(p.batch.pool.base + row / (2 * kPageTokens) * p.page_bytes);
    for (int c = 0; c < p.head_dim; ++c) dot += ToF(q[c]) * E4M3Float(half[slot * p.head_dim + c]);
    return dot * RowScaleFloat(half[kPageTokens * p.head_dim + slot]) * p.scale;
  }
  const Kv* k = reinterpret_cast<const Kv*>(p.batch.pool.base) + s.KeyRow(j) * p.head_dim;
  for (int c = 0; c < p.head_dim; ++c) dot += ToF(q[c]) * ToF(k[c]);
  return dot * p.scale;
}

template <typename Q, typename Kv>
__global__ void __launch_bounds__(kGenericThreads) GenericStatsKernel(const __grid_constant__ Params p) {
  __shared__ Stats warps[kGenericThreads / 32];
  LetNextStart();
  const int stream = static_cast<int>(blockIdx.y), split = static_cast<int>(blockIdx.x);
  const Stream s(p, stream);
  WaitForPrevious();
  if (!s.is_scored() || split >= s.num_splits()) return;
  const int t = static_cast<int>(threadIdx.x), begin = split * s.split_keys(), end = begin + s.split_keys();
  for (int row = 0; row < p.rows; ++row) {
    const int sees = min(s.sees(p, row), end);
    const Q* q = reinterpret_cast<const Q*>(s.query(p, row));
    Stats mine;
    for (int j = begin + t; j < sees; j += kGenericThreads) mine.Add({Score<Q, Kv>(p, s, q, j), 1});
    mine.AddLanes(1, 32);
    if (t % 32 == 0) warps[t / 32] = mine;
    __syncthreads();
    if (t == 0) {
      for (int w = 1; w < kGenericThreads / 32; ++w) mine.Add(warps[w]);
      p.parts[(static_cast<int64_t>(stream) * p.rows + row) * kMaxSplits + split] = {mine.max, mine.sum};
    }
    __syncthreads();
  }
  CombineSplits<kGenericThreads>(p, s, stream, s.num_splits());
}

template <typename Q, typename Kv>
__global__ void __launch_bounds__(kGenericThreads) GenericScoresKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const int stream = static_cast<int>(blockIdx.y);
  const Stream s(p, stream);
  WaitForPrevious();
  if (!s.is_scored()) return;
  const int step = static_cast<int>(gridDim.x) * kGenericThreads;
  for (int j = static_cast<int>(blockIdx.x * kGenericThreads + threadIdx.x); j < s.own.count; j += step) {
    float sum = 0;
    for (int row = 0; row < p.rows; ++row) {
      if (j >= s.sees(p, row)) continue;
      const Q* q = reinterpret_cast<const Q*>(s.query(p, row));
      sum += Exp2(Score<Q, Kv>(p, s, q, j) - p.lse[static_cast<int64_t>(stream) * p.rows + row]);
    }
    p.scores[stream * p.scores_stride + j] = sum;
  }
}

// ---- bf16, tensor cores ---------------------------------------------------------------------------------------------
// Loads queries [first, first + count) of the window, count a multiple of 16; writes zeros past the last one, and for
// queries that were not recorded. For each four chunks of a row, which lie in four lanes' keys, words of equal number
// are put side by side: ldmatrix then gives a lane the word of the dimensions that its keys have there. sees [count]:
// as Stream::sees.
template <int kDim>
__device__ __forceinline__ void LoadQueries(const Params& p, const Stream& s, int first, int count, uint8_t* to,
                                            int32_t* sees) {
  constexpr int kChunks = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < count * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int seen = s.sees(p, first + row);
    uint4 x{};
    if (seen > 0) x = reinterpret_cast<const uint4*>(s.query(p, first + row))[chunk];
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      *reinterpret_cast<uint32_t*>(to + Swizzled<kDim * 2>(row, chunk / 4 * 4 + w) + chunk % 4 * 4) = words[w];
    }
    if (chunk == 0) sees[row] = seen;
  }
}

// 32 keys, the right operands of four products: of each 8, lane (g, c) has 16-byte chunks c, c + 4, ... of row g. The
// two words of a product are neighbours, as the registers of a right operand must be.
template <int kDim>
struct Keys {
  static constexpr int kSteps = kDim / 32;
  uint4 x[4][kSteps];

  __device__ __forceinline__ void Load(const __nv_bfloat16* page, int first_slot) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto* row = reinterpret_cast<const uint4*>(page + (first_slot + 8 * n + g) * kDim);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[n][i] = row[4 * i + c];
    }
  }

  // Loads candidates from `first` on: rows that lie anywhere.
  __device__ __forceinline__ void LoadListed(const __nv_bfloat16* pool, const Stream& s, int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
    const int64_t mine = s.KeyRow(first + lane);  // 32 keys, one a lane
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto* row = reinterpret_cast<const uint4*>(pool + __shfl_sync(0xffffffffu, mine, 8 * n + g) * kDim);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[n][i] = row[4 * i + c];
    }
  }

  // Products of queries 16 tile to 16 tile + 15 of shared memory with the keys: out[n] has those of queries g (first
  // two) and g + 8 with keys 8 n + 2 c and 8 n + 2 c + 1.
  __device__ __forceinline__ void Multiply(const uint8_t* queries, int tile, float (&out)[4][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t base = SmemAddress(queries);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) out[n][k] = 0;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t q[4];
        LdMatrix4(q, base + Swizzled<kDim * 2>(16 * tile + lane % 16, 4 * i + 2 * half + lane / 16));
#pragma unroll
        for (int n = 0; n < 4; ++n)
          Mma16816(out[n], q, half == 0 ? x[n][i].x : x[n][i].z, half == 0 ? x[n][i].y : x[n][i].w);
      }
    }
  }
};

// The tiles of a warp in a split, and the pages they are on. kListed: keys are looked up candidate by candidate.
template <int kDim, bool kListed>
class WarpTiles {
 public:
  __device__ __forceinline__ WarpTiles(const Params& p, const Stream& s, int begin, int end)
      : p_(p), s_(s), first_(begin + static_cast<int>(threadIdx.x) / 32 * kTileKeys) {
    count_ = end > first_ ? (end - first_ + kWarps * kTileKeys - 1) / (kWarps * kTileKeys) : 0;
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int key(int i) const { return first_ + i * kWarps * kTileKeys; }
  __device__ __forceinline__ int32_t page(int i) const {
    return !kListed && i < count_ ? s_.table[key(i) / kPageTokens] : 0;
  }
  __device__ __forceinline__ void Load(Keys<kDim>& keys, int i, int32_t page) const {
    if constexpr (kListed) {
      keys.LoadListed(reinterpret_cast<const __nv_bfloat16*>(p_.batch.pool.base), s_, key(i));
      return;
    }
    keys.Load(reinterpret_cast<const __nv_bfloat16*>(p_.batch.pool.base + page * p_.page_bytes), key(i) % kPageTokens);
  }

 private:
  const Params& p_;
  const Stream& s_;
  const int first_;
  int count_;
};

// Block (split, chunk of queries, stream).
template <int kDim, bool kListed>
__global__ void __launch_bounds__(kThreads, 2) StatsKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t queries[];
  __shared__ Stats warp_stats[kWarps][kChunkRows];
  __shared__ int32_t sees[kChunkRows];
  LetNextStart();
  const int split = static_cast<int>(blockIdx.x), chunk = static_cast<int>(blockIdx.y);
  const int stream = static_cast<int>(blockIdx.z);
  const Stream s(p, stream);
  WaitForPrevious();
  if (!s.is_scored() || split >= s.num_splits()) return;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32, g = lane / 4, c = lane % 4;
  const int begin = split * s.split_keys(), end = min(begin + s.split_keys(), s.own.count);
  const WarpTiles<kDim, kListed> tiles(p, s, begin, end);
  Keys<kDim> keys;
  int32_t page = tiles.page(1);
  if (tiles.count() > 0) tiles.Load(keys, 0, tiles.page(0));
  LoadQueries<kDim>(p, s, chunk * kChunkRows, kChunkRows, queries, sees);
  __syncthreads();
  Stats stats[kChunkRows / 16][2];
  for (int i = 0; i < tiles.count(); ++i) {
    // The other warps' products hide the time that keys take: registers for the next ones would halve their number.
    if (i > 0) {
      tiles.Load(keys, i, page);
      page = tiles.page(i + 1);
    }
    const int first = tiles.key(i);
    const bool plain = first + kTileKeys <= s.own.count - p.window;  // every query sees all of them
#pragma unroll
    for (int tile = 0; tile < kChunkRows / 16; ++tile) {
      if (chunk * kChunkRows + tile * 16 >= p.rows) continue;
      float out[4][4];
      keys.Multiply(queries, tile, out);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!plain) {
          const int seen = sees[tile * 16 + 8 * r + g];
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            if (first + 8 * (k / 2) + 2 * c + k % 2 >= seen) out[k / 2][2 * r + k % 2] = -INFINITY;
          }
        }
        Stats& mine = stats[tile][r];
        float most = out[0][2 * r];
#pragma unroll
        for (int k = 1; k < 8; ++k) most = fmaxf(most, out[k / 2][2 * r + k % 2]);
        most = fmaxf(mine.max, most * p.scale);
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += Exp2(out[k / 2][2 * r + k % 2] * p.scale - most);
        mine.sum = mine.sum * Exp2(mine.max - most) + sum;
        mine.max = most;
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kChunkRows / 16; ++tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      stats[tile][r].AddLanes(1, 4);
      if (c == 0) warp_stats[warp][tile * 16 + 8 * r + g] = stats[tile][r];
    }
  }
  __syncthreads();
  const int row = chunk * kChunkRows + t;
  if (t < kChunkRows && row < p.rows) {
    Stats all = warp_stats[0][t];
    for (int w = 1; w < kWarps; ++w) all.Add(warp_stats[w][t]);
    p.parts[(static_cast<int64_t>(stream) * p.rows + row) * kMaxSplits + split] = {all.max, all.sum};
  }
  CombineSplits<kThreads>(p, s, stream, s.num_splits() * static_cast<int>(gridDim.y));
}

// Block (split, stream).
template <int kDim, bool kListed>
__global__ void __launch_bounds__(kThreads, 2) ScoresKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t queries[];
  LetNextStart();
  const int split = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
  const int stream = static_cast<int>(blockIdx.y);
  const Stream s(p, stream);
  WaitForPrevious();
  if (!s.is_scored() || split >= s.num_splits()) return;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, g = lane / 4, c = lane % 4;
  const int query_tiles = (p.rows + 15) / 16;
  auto* lse = reinterpret_cast<float*>(queries + static_cast<int64_t>(query_tiles) * 16 * kDim * 2);
  auto* sees = reinterpret_cast<int32_t*>(lse + query_tiles * 16);
  const int begin = split * s.split_keys(), end = min(begin + s.split_keys(), s.own.count);
  const WarpTiles<kDim, kListed> tiles(p, s, begin, end);
  Keys<kDim> keys;
  int i = tiles.count() - 1;
  const int last = i;
  int32_t page = i > 0 ? tiles.page(i - 1) : 0;
  if (i >= 0) tiles.Load(keys, i, tiles.page(i));
  LoadQueries<kDim>(p, s, 0, query_tiles * 16, queries, sees);
  for (int row = t; row < query_tiles * 16; row += kThreads)
    lse[row] = row < p.rows ? p.lse[static_cast<int64_t>(stream) * p.rows + row] : INFINITY;
  __syncthreads();
  for (; i >= 0; --i) {
    if (i < last) {
      tiles.Load(keys, i, page);
      page = i > 0 ? tiles.page(i - 1) : 0;
    }
    const int first = tiles.key(i);
    const bool plain = first + kTileKeys <= s.own.count - p.window;
    float sums[8] = {};  // sums of keys 8 (k / 2) + 2 c + k % 2
#pragma unroll 2
    for (int tile = 0; tile < query_tiles; ++tile) {
      float out[4][4];
      keys.Multiply(queries, tile, out);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile * 16 + 8 * r + g;
        const float of = lse[row];
        const int seen = plain ? 1 << 30 : sees[row];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const float x = Exp2(out[k / 2][2 * r + k % 2] * p.scale - of);
          sums[k] += first + 8 * (k / 2) + 2 * c + k % 2 < seen ? x : 0;
        }
      }
    }
    float mine = 0;  // the sum of key k for lanes with g = k
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], 4);
      sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], 8);
      sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], 16);
      if (g == k) mine = sums[k];
    }
    const int j = first + 8 * (g / 2) + 2 * c + g % 2;
    if (j < s.own.count) p.scores[stream * p.scores_stride + j] = mine;
  }
}

template <int kDim, bool kListed>
cudaError_t LaunchMma(const Params& p, int splits, int streams, cudaStream_t stream) {
  const int chunks = (p.rows + kChunkRows - 1) / kChunkRows, padded = (p.rows + 15) / 16 * 16;
  constexpr size_t kStatsBytes = size_t{kChunkRows} * kDim * 2;
  const size_t scores_bytes = static_cast<size_t>(padded) * (kDim * 2 + sizeof(float) + sizeof(int32_t));
  cudaError_t e =
      cudaFuncSetAttribute(StatsKernel<kDim, kListed>, cudaFuncAttributeMaxDynamicSharedMemorySize, kStatsBytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(ScoresKernel<kDim, kListed>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(scores_bytes));
  if (e == cudaSuccess) {
    e = LaunchEarly(StatsKernel<kDim, kListed>, dim3(splits, chunks, streams), kThreads, kStatsBytes, stream, p);
  }
  if (e == cudaSuccess)
    e = LaunchEarly(ScoresKernel<kDim, kListed>, dim3(splits, streams), kThreads, scores_bytes, stream, p);
  return e;
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const Params& p, int splits, int streams, cudaStream_t stream) {
  const cudaError_t e = LaunchEarly(GenericStatsKernel<Q, Kv>, dim3(splits, streams), kGenericThreads, 0, stream, p);
  if (e != cudaSuccess) return e;
  constexpr int kBlocksPerSplit = kSplitKeys / kGenericThreads;
  return LaunchEarly(GenericScoresKernel<Q, Kv>, dim3(splits * kBlocksPerSplit, streams), kGenericThreads, 0, stream,
                     p);
}

cudaError_t LaunchScores(const QueryWindowArgs& a, const Params& p, int splits, int streams, WindowVariant variant,
                         cudaStream_t stream) {
  const bool bf16_q = a.q.dtype == DType::kBF16, bf16_kv = a.pool.dtype == DType::kBF16;
  const bool mma = bf16_q && bf16_kv && p.rows <= kMaxMmaRows && (p.head_dim == 64 || p.head_dim == 128);
  if (variant == WindowVariant::kMma && !mma) return cudaErrorNotSupported;
  if (mma && variant != WindowVariant::kGeneric) {
    const auto launch_mma = p.head_dim == 128 ? (a.listed ? LaunchMma<128, true> : LaunchMma<128, false>)
                                              : (a.listed ? LaunchMma<64, true> : LaunchMma<64, false>);
    return launch_mma(p, splits, streams, stream);
  }
  const auto launch_generic = [&](auto q) {
    using Q = decltype(q);
    if (a.pool.dtype == DType::kE4M3) return LaunchGeneric<Q, uint8_t>(p, splits, streams, stream);
    return bf16_kv ? LaunchGeneric<Q, __nv_bfloat16>(p, splits, streams, stream)
                   : LaunchGeneric<Q, float>(p, splits, streams, stream);
  };
  return bf16_q ? launch_generic(__nv_bfloat16{}) : launch_generic(float{});
}

int32_t Rows(const QueryWindowArgs& a) { return a.window * (a.shape.num_qo_heads / a.shape.num_kv_heads); }
// The counters come first, where launches of other shapes with the same scratch do not write.
size_t CounterBytes(int32_t max_streams) { return (static_cast<size_t>(max_streams) * 4 + 255) / 256 * 256; }

}  // namespace

size_t QueryWindowScratchBytes(const QueryWindowArgs& a, const QueryWindowLaunch& launch) {
  if (!a.chooses) return 0;
  const size_t rows = static_cast<size_t>(launch.batch.num_sequences) * a.shape.num_kv_heads * Rows(a);
  return CounterBytes(launch.max_streams) + (rows * sizeof(float) + 15) / 16 * 16 + rows * kMaxSplits * sizeof(float2);
}

cudaError_t ChooseByQueryWindow(const QueryWindowArgs& a, const QueryWindowLaunch& launch, cudaStream_t stream,
                                WindowVariant variant) {
  const int streams = launch.batch.num_sequences * a.shape.num_kv_heads;
  if (streams == 0) return cudaSuccess;
  const int32_t rows = Rows(a);
  const QueryWindow layout{.head_dim = a.shape.head_dim,
                           .group = a.shape.num_qo_heads / a.shape.num_kv_heads,
                           .window = a.window,
                           .budget = 1,
                           .query_dtype = a.q.dtype,
                           .page_bytes = a.pool.page_bytes()};
  auto* scratch = static_cast<std::byte*>(launch.scratch);
  auto* lse = reinterpret_cast<float*>(scratch + CounterBytes(launch.max_streams));
  const size_t lse_bytes = (static_cast<size_t>(streams) * rows * sizeof(float) + 15) / 16 * 16;
  const Params p{.batch = launch.batch,
                 .selection = launch.selection,
                 .q = a.q.data,
                 .q_row_stride = a.q_row_stride,
                 .tokens = a.lists.tokens,
                 .counts = a.lists.counts,
                 .list_stride = a.lists.stride,
                 .scores = a.scores,
                 .scores_stride = a.scores_stride,
                 .arrived = reinterpret_cast<uint32_t*>(scratch),
                 .lse = lse,
                 .parts = reinterpret_cast<float2*>(reinterpret_cast<std::byte*>(lse) + lse_bytes),
                 .page_bytes = static_cast<int64_t>(a.pool.page_bytes()),
                 .num_kv_heads = a.shape.num_kv_heads,
                 .group = layout.group,
                 .head_dim = a.shape.head_dim,
                 .window = a.window,
                 .rows = rows,
                 .rows_per_page = static_cast<int32_t>(layout.rows_per_page()),
                 .query_pages = static_cast<int32_t>(layout.query_pages()),
                 .entries_per_page = static_cast<int32_t>(layout.entries_per_page()),
                 .query_bytes = static_cast<int32_t>(DTypeBytes(a.q.dtype)),
                 .scale = a.shape.sm_scale * kLog2e};
  cudaError_t e = LaunchEarly(RecordKernel, dim3(streams), kThreads, 0, stream, p);
  if (e != cudaSuccess || !a.chooses) return e;

  const int splits = std::min((launch.max_kv_len + kSplitKeys - 1) / kSplitKeys, kMaxSplits);
  e = LaunchScores(a, p, splits, streams, variant, stream);
  if (e != cudaSuccess) return e;
  // Lists of the sequences that choose; those of the others are RecordKernel's.
  SelectionBatch choosing = launch.selection;
  choosing.flags = StagedStep::kSelects | StagedStep::kRefresh;
  // Each query's weights add up to one, so the k-th largest of a stream is at most their number over k.
  const TopTokensArgs top{.scores = a.scores,
                          .scores_stride = a.scores_stride,
                          .granularity = 1,
                          .num_kv_heads = a.shape.num_kv_heads,
                          .lists = a.lists,
                          .layer = a.layer};
  e = TopTokens(top, choosing, launch.batch.kv_len, launch.batch.num_sequences, launch.max_kv_len, stream,
                static_cast<float>(rows));
  return e != cudaSuccess ? e : LaunchEarly(KeepKernel, dim3(streams), kThreads, 0, stream, p);
}

}  // namespace spl::kernels::cuda
