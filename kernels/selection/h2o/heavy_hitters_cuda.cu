// One block per stream. A warp scores one key at a time, its lanes the dimensions; lane g has the numbers of query head
// g. The first pass over the list finds each head's maximum and sum, the second adds up the weights. All sums have a
// fixed order. A baseline: plain, not fast.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/selection/h2o/heavy_hitters_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLaneDims = 256 / 32;  // dimensions of the widest head that a lane has
constexpr float kLowest = -3.0e38f;  // below every score, and finite: a difference of two of them is a number
constexpr unsigned kAll = 0xffffffffu;

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const void* q;
  int64_t q_row_stride;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  float* attention;
  int64_t attention_stride;
  int64_t page_bytes;
  int32_t num_kv_heads, group, head_dim;
  float scale;  // sm_scale
};

// The maximum of some scores, and the sum of exp(score - maximum).
struct Stats {
  float max, sum;
  __device__ void Add(const Stats& other) {
    const float most = fmaxf(max, other.max);
    sum = sum * __expf(max - most) + other.sum * __expf(other.max - most);
    max = most;
  }
};

// Lane's dimensions of the key at `position`, widened.
template <typename Kv>
__device__ __forceinline__ void LoadKey(const Params& p, const int32_t* table, int32_t position, int lane,
                                        float (&key)[kLaneDims]) {
  const std::byte* page = p.batch.pool.base + table[position / kPageTokens] * p.page_bytes;
  const Kv* row = reinterpret_cast<const Kv*>(page) + position % kPageTokens * p.head_dim;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int c = i * 32 + lane;
    if constexpr (std::is_same_v<Kv, uint8_t>) {
      key[i] = c < p.head_dim ? E4M3Float(row[c]) : 0.0f;
    } else {
      key[i] = c < p.head_dim ? ToF(row[c]) : 0.0f;
    }
  }
  if constexpr (std::is_same_v<Kv, uint8_t>) {
    const float scale =
        RowScaleFloat(reinterpret_cast<const uint8_t*>(page)[kPageTokens * p.head_dim + position % kPageTokens]);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) key[i] *= scale;
  }
}

// The score of query head g, the same in every lane. q [group, head_dim].
__device__ __forceinline__ float Score(const Params& p, const float* q, int g, int lane,
                                       const float (&key)[kLaneDims]) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int c = i * 32 + lane;
    if (c < p.head_dim) dot += q[g * p.head_dim + c] * key[i];
  }
  return WarpSum(dot) * p.scale;
}

// One stream, as its block sees it.
struct Stream {
  int32_t sequence, head, budget, recent;
  const int32_t* table;
  const int32_t* compact;
  int32_t* tokens;   // the list
  float* attention;  // of each of its positions
  std::byte* pool;
  int64_t page_bytes;

  __device__ Stream(const Params& p, int stream)
      : sequence(stream / p.num_kv_heads),
        head(stream % p.num_kv_heads),
        budget(min(p.selection.sequences[sequence].budget,
                   static_cast<int32_t>(min(p.list_stride, p.attention_stride)) - 1)),
        recent(p.selection.sequences[sequence].recent),
        table(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        compact(p.selection.CompactPages(sequence, head)),
        tokens(p.tokens + stream * p.list_stride),
        attention(p.attention + stream * p.attention_stride),
        pool(p.batch.pool.base),
        page_bytes(p.page_bytes) {}

  // Word of the stream's pages (HeavyHitterPages).
  __device__ int32_t& word(int64_t i) const {
    const int64_t per_page = page_bytes / 4;
    return reinterpret_cast<int32_t*>(pool + compact[i / per_page] * page_bytes)[i % per_page];
  }
};

// Copies what is kept to the list, and the step's own position behind it. Returns their number.
__device__ __forceinline__ int32_t Join(const Params& p, const Stream& s, int t) {
  const int32_t kept = min(s.word(0), s.budget);
  for (int32_t k = t; k < kept; k += kThreads) {
    s.tokens[k] = s.word(HeavyHitterPages::kPosition + 2 * int64_t{k});
    s.attention[k] = __int_as_float(s.word(HeavyHitterPages::kAttention + 2 * int64_t{k}));
  }
  if (t == 0) {
    s.tokens[kept] = p.batch.kv_len[s.sequence] - 1;
    s.attention[kept] = 0;
    p.counts[blockIdx.x] = kept + 1;
  }
  return kept + 1;
}

// Adds what the query heads pay to each entry of the list, with lane g's maximum and sum of head g. Returns the
// smallest entry of those that may leave: its attention in the upper half, and below it less for later ones.
template <typename Kv>
__device__ __forceinline__ unsigned long long AddAttention(const Params& p, const Stream& s, const float* q,
                                                           int32_t count, const Stats& of_head) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  unsigned long long smallest = ~0ull;
  float key[kLaneDims];
  for (int32_t k = warp; k < count; k += kWarps) {
    LoadKey<Kv>(p, s.table, s.tokens[k], lane, key);
    float weight = 0;
    for (int g = 0; g < p.group; ++g) {
      const float score = Score(p, q, g, lane, key);
      if (lane == g) weight = __expf(score - of_head.max) / of_head.sum;
    }
    const float sum = s.attention[k] + WarpSum(weight);
    __syncwarp();  // every lane has read it
    if (lane == 0) s.attention[k] = sum;
    if (k >= count - s.recent) continue;
    const uint32_t bits = sum > 0 ? __float_as_uint(sum) : 0;
    smallest = min(smallest, static_cast<unsigned long long>(bits) << 32 | (kAll - static_cast<uint32_t>(k)));
  }
  return smallest;
}

// Keeps the list but for the entry that leaves. The list and its attention are copies: nothing that is read here is
// written here.
__device__ __forceinline__ void Evict(const Stream& s, int32_t count, unsigned long long smallest, int t) {
  const bool full = count > s.budget && smallest != ~0ull;
  const int32_t leaves = full ? static_cast<int32_t>(kAll - static_cast<uint32_t>(smallest)) : count;
  for (int32_t k = t; k < count; k += kThreads) {
    if (k == leaves) continue;
    const int64_t to = k < leaves ? k : k - 1;
    s.word(HeavyHitterPages::kPosition + 2 * to) = s.tokens[k];
    s.word(HeavyHitterPages::kAttention + 2 * to) = __float_as_int(s.attention[k]);
  }
  if (t == 0) s.word(0) = full ? count - 1 : count;
}

template <typename Q, typename Kv>
__global__ void __launch_bounds__(kThreads) HittersKernel(const __grid_constant__ Params p) {
  extern __shared__ float q[];  // [group, head_dim]
  __shared__ Stats of_warp[kWarps][kMaxHitterGroup];
  __shared__ unsigned long long least[kWarps];
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const Stream s(p, static_cast<int>(blockIdx.x));
  if (!p.selection.Selects(s.sequence, s.head)) return;
  const int32_t count = Join(p, s, t);
  const Q* from =
      static_cast<const Q*>(p.q) + s.sequence * p.q_row_stride + static_cast<int64_t>(s.head) * p.group * p.head_dim;
  for (int i = t; i < p.group * p.head_dim; i += kThreads) q[i] = ToF(from[i]);
  __syncthreads();

  // Maximum and sum of each query head.
  float key[kLaneDims];
  Stats mine{kLowest, 0};
  for (int32_t k = warp; k < count; k += kWarps) {
    LoadKey<Kv>(p, s.table, s.tokens[k], lane, key);
    for (int g = 0; g < p.group; ++g) {
      const float score = Score(p, q, g, lane, key);
      if (lane == g) mine.Add({score, 1});
    }
  }
  of_warp[warp][lane] = mine;
  __syncthreads();
  Stats of_head{kLowest, 0};
  for (int w = 0; w < kWarps; ++w) of_head.Add(of_warp[w][lane]);

  const unsigned long long own = AddAttention<Kv>(p, s, q, count, of_head);
  if (lane == 0) least[warp] = own;  // every lane has the same
  __syncthreads();
  unsigned long long smallest = ~0ull;
  for (int w = 0; w < kWarps; ++w) smallest = min(smallest, least[w]);
  Evict(s, count, smallest, t);
}

template <typename Q, typename Kv>
cudaError_t Launch(const Params& p, int num_streams, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(p.group) * static_cast<size_t>(p.head_dim) * sizeof(float);
  HittersKernel<Q, Kv><<<static_cast<unsigned>(num_streams), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Q>
cudaError_t LaunchFor(const Params& p, int num_streams, cudaStream_t stream) {
  switch (p.batch.pool.dtype) {
    case DType::kF32:
      return Launch<Q, float>(p, num_streams, stream);
    case DType::kBF16:
      return Launch<Q, __nv_bfloat16>(p, num_streams, stream);
    case DType::kE4M3:
      return Launch<Q, uint8_t>(p, num_streams, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

cudaError_t HeavyHitters(const HeavyHittersArgs& a, const PagedBatch& batch, const SelectionBatch& selection,
                         cudaStream_t stream) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  const int num_streams = batch.num_sequences * a.shape.num_kv_heads;
  if (num_streams == 0) return cudaSuccess;
  if (group > kMaxHitterGroup) return cudaErrorNotSupported;
  const Params p{.batch = batch,
                 .selection = selection,
                 .q = a.q.data,
                 .q_row_stride = a.q_row_stride,
                 .tokens = a.lists.tokens,
                 .counts = a.lists.counts,
                 .list_stride = a.lists.stride,
                 .attention = a.attention,
                 .attention_stride = a.attention_stride,
                 .page_bytes = static_cast<int64_t>(a.pool.page_bytes()),
                 .num_kv_heads = a.shape.num_kv_heads,
                 .group = group,
                 .head_dim = a.shape.head_dim,
                 .scale = a.shape.sm_scale};
  return a.q.dtype == DType::kF32 ? LaunchFor<float>(p, num_streams, stream)
                                  : LaunchFor<__nv_bfloat16>(p, num_streams, stream);
}

}  // namespace spl::kernels::cuda
