// One cluster of blocks a stream: a block has consecutive tiles of 64 positions, scores them, keeps their weights in
// shared memory and takes its part in the choice. What of the compact keys was there before this step is on its way
// into registers while the kernel in front still runs.
//
// Scores by mma m16n8k16, 16 positions against 8 query heads over 16 dimensions. A lane loads 16 bytes of a dimension's
// row, 8 positions, and pairs the positions 2m and 2m + 1 of its four dimensions for the m-th product: rows of an mma
// may be any positions as long as its results are taken to be theirs, so nothing goes through shared memory before.
// Other shapes and types are scored by plain loops.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/selection/select_tokens_cuda.h"
#include "kernels/selection/token_choice_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kTile = kPageTokens;
constexpr int kMaxGroup = 64;
constexpr int kMaxDim = 256;
constexpr int kMmaDims = 16;
constexpr int64_t kSmemScores = 128 << 10;  // bytes that a block of sm_90 may have for its scores

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const void* q;
  int64_t q_row_stride;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  float* weights;
  int64_t weights_stride;
  float* scratch;  // [streams, group, scratch_stride]; null: scores are in shared memory
  int64_t scratch_stride;
  int64_t dims_offset;
  int32_t num_kv_heads, group, head_dim, num_dims;
  int32_t smem_scores;  // positions of a block that fit in its shared memory
  float scale;          // sm_scale · log2(e)
  bool early;
};

__device__ __forceinline__ float Load(const float* p) { return *p; }
__device__ __forceinline__ float Load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

template <int kBlocks, int kThreads>
struct Smem {
  typename TokenChoice<kBlocks, kThreads>::Smem choice;
  float2 stats[kBlocks][kMaxGroup];  // of each block and query head: maximum of the scores, sum of 2^(score - maximum)
  float partial[kThreads / 32][kMaxGroup];
  float factor[kMaxGroup], largest[kMaxGroup];  // of each query head: what weights are multiplied with, can be
  int32_t dims[kMaxDim];                        // valid in this step
  int32_t changed[kMaxDim];
  float size[kMaxDim];
  uint32_t chosen[kMaxDim / 32], fresh[kMaxDim / 32], moved[kMaxDim / 32];
  int num_changed;
};

// Step (a): smem.dims and smem.changed. All threads; q of this KV head's group.
template <int kThreads, typename SmemT, typename Q>
__device__ __forceinline__ void ChooseDims(SmemT& s, const Params& p, const Q* q, const int32_t* before, bool first) {
  const int t = threadIdx.x, lane = t % 32;
  float size = 0;
  if (t < p.head_dim) {
    for (int h = 0; h < p.group; ++h) size = __fadd_rn(size, fabsf(Load(q + h * p.head_dim + t)));
    s.size[t] = size;
  }
  if (t < kMaxDim / 32) s.moved[t] = 0;
  __syncthreads();
  bool chosen = false;
  if (t < p.head_dim) {
    const uint32_t mine = OrderedKey(size);
    int larger = 0;
    for (int c = 0; c < p.head_dim; ++c) {
      const uint32_t other = OrderedKey(s.size[c]);
      larger += other > mine || (other == mine && c < t);
    }
    chosen = larger < p.num_dims;
  }
  const uint32_t word = __ballot_sync(0xffffffffu, chosen);
  if (lane == 0 && t < kMaxDim) s.chosen[t / 32] = s.fresh[t / 32] = word;
  __syncthreads();
  int32_t dim = 0;
  bool keeps = false;
  if (t < p.num_dims && !first) {
    dim = before[t];
    keeps = s.chosen[dim / 32] >> (dim % 32) & 1;
    if (keeps) atomicAnd(&s.fresh[dim / 32], ~(1u << (dim % 32)));
  }
  const uint32_t moved = __ballot_sync(0xffffffffu, t < p.num_dims && !keeps);
  if (lane == 0 && t < kMaxDim) s.moved[t / 32] = moved;
  __syncthreads();
  if (t < p.num_dims) {
    if (!keeps) {  // the r-th slot that moved takes the r-th dimension that is fresh
      int r = __popc(moved & ((1u << lane) - 1));
      for (int w = 0; w < t / 32; ++w) r += __popc(s.moved[w]);
      s.changed[r] = t;
      int w = 0;
      uint32_t bits = s.fresh[0];
      for (int left = r;; --left) {
        while (bits == 0) bits = s.fresh[++w];
        dim = 32 * w + __ffs(bits) - 1;
        bits &= bits - 1;
        if (left == 0) break;
      }
    }
    s.dims[t] = dim;
  }
  if (t == 0) {
    int n = 0;
    for (int w = 0; w < kMaxDim / 32; ++w) n += __popc(s.moved[w]);
    s.num_changed = n;
  }
  __syncthreads();
}

// Where tile `tile` of a stream's compact keys is, in elements of the pool.
__device__ __forceinline__ int64_t CompactTile(const Params& p, const int32_t* compact, int32_t tile,
                                               int32_t tiles_per_page, int64_t page_elements) {
  return compact[tile / tiles_per_page] * page_elements + int64_t{tile % tiles_per_page} * p.num_dims * kTile;
}

// Gathers `slots` of positions [begin, end) of tile `tile`; a warp.
template <typename Kv>
__device__ __forceinline__ void GatherTile(const Params& p, const int32_t* table, int64_t tile_at, int32_t tile,
                                           int32_t begin, int32_t end, const int32_t* slots, int num_slots,
                                           const int32_t* dims) {
  Kv* pool = reinterpret_cast<Kv*>(p.batch.pool.base);
  const Kv* keys = pool + int64_t{table[tile]} * 2 * kTile * p.head_dim;
  Kv* to = pool + tile_at;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = 32 * half + lane, j = tile * kTile + slot;
    if (j < begin || j >= end) continue;
    const Kv* key = keys + slot * p.head_dim;
    for (int i = 0; i < num_slots; ++i) {
      const int at = slots == nullptr ? i : slots[i];
      to[at * kTile + slot] = key[dims[at]];
    }
  }
}

// kMma: bf16 throughout, 16 dimensions, at most 16 query heads a KV head. kTiles: of a warp in flight.
template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeadTiles, bool kScoresInSmem, typename Q, typename Kv>
__device__ __forceinline__ void Select(const Params& p) {
  using C = Cluster<kBlocks>;
  using Choice = TokenChoice<kBlocks, kThreads>;
  constexpr int kWarps = kThreads / 32;
  extern __shared__ __align__(16) char raw[];
  auto& s = *reinterpret_cast<Smem<kBlocks, kThreads>*>(raw);
  LetNextStart();
  const int rank = C::Rank();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const StagedStep step = p.selection.steps[sequence];
  if ((step.flags & StagedStep::kSelects) == 0) {
    WaitForPrevious();
    return;
  }
  const StagedSequence& staged = p.selection.sequences[sequence];
  const int32_t kv_len = p.batch.kv_len[sequence];
  const int32_t budget = min(staged.budget, static_cast<int32_t>(p.list_stride));
  const bool everything = kv_len <= budget;
  const bool scores_wanted = !everything || p.weights != nullptr;
  if (scores_wanted) {
    Choice::Clear(s.choice);
    C::Arrive();  // waited for in front of the first word for another block
  }
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, g = lane / 4, c = lane % 4;
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;
  const int32_t* compact = p.selection.compact_tables + staged.compact_offset + head * p.selection.compact_head_stride;
  const int32_t tiles_per_page = 2 * p.head_dim / p.num_dims;
  const int64_t page_elements = int64_t{2} * kTile * p.head_dim;
  const int32_t num_tiles = (kv_len + kTile - 1) / kTile, share = (num_tiles + kBlocks - 1) / kBlocks;
  const int32_t first_tile = min(rank * share, num_tiles), end_tile = min(first_tile + share, num_tiles);
  const int32_t begin = first_tile * kTile, end = min(end_tile * kTile, kv_len);  // this block's positions

  const bool refresh = step.flags & StagedStep::kRefresh, first = step.flags & StagedStep::kFirst;
  const int32_t gathered = first ? 0 : step.compact_len;
  int32_t* dims_table = staged.dims + p.dims_offset + head * 2 * p.num_dims;
  const int parity = step.flags & StagedStep::kParity ? 1 : 0;
  const int32_t* dims_before = dims_table + parity * p.num_dims;
  const Q* q = static_cast<const Q*>(p.q) + sequence * p.q_row_stride + int64_t{head} * p.group * p.head_dim;
  const Kv* pool = reinterpret_cast<const Kv*>(p.batch.pool.base);
  // A step as most are: the positions to append are all in the last tile, whose other ones are there already.
  const bool plain = kMma && !refresh && gathered >= (num_tiles - 1) * kTile;

  uint32_t keys[kTiles][4][4];  // of this lane's dimension and word
  int32_t dims[4];
  // `i` as a type, so that keys stay in registers.
  const auto load = [&](auto i, int32_t tile) {
    if constexpr (kMma) {
      const uint4* from =
          reinterpret_cast<const uint4*>(pool + CompactTile(p, compact, tile, tiles_per_page, page_elements));
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const uint4 x = from[(2 * c + (d & 1) + (d & 2) * 4) * 8 + g];
        keys[i][d][0] = x.x, keys[i][d][1] = x.y, keys[i][d][2] = x.z, keys[i][d][3] = x.w;
      }
    }
  };
  const auto for_each_in_flight = [](const auto& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) { (body(std::integral_constant<int, i>{}), ...); }
    (std::make_integer_sequence<int, kTiles>{});
  };
  // The last tile first: it is the one that changes.
  const auto tile_of = [&](int i) { return end_tile - 1 - warp - i * kWarps; };
  const auto load_some = [&] {
    for_each_in_flight([&](auto i) {
      if (tile_of(i) >= first_tile) load(i, tile_of(i));
    });
  };
  if (!p.early) WaitForPrevious();
  if (plain) {
    if (scores_wanted) load_some();
    if (t < p.num_dims) s.dims[t] = dims_before[t];
  }
  WaitForPrevious();
  if (refresh) {
    ChooseDims<kThreads>(s, p, q, dims_before, first);
    if (rank == 0 && t < p.num_dims) dims_table[(1 - parity) * p.num_dims + t] = s.dims[t];
  } else {
    if (!plain && t < p.num_dims) s.dims[t] = dims_before[t];
    __syncthreads();
  }
  if (!plain) {
    for (int32_t tile = first_tile + warp; tile < end_tile; tile += kWarps) {
      const int64_t at = CompactTile(p, compact, tile, tiles_per_page, page_elements);
      if (refresh && tile * kTile < gathered)
        GatherTile<Kv>(p, table, at, tile, 0, gathered, s.changed, s.num_changed, s.dims);
      if (tile * kTile + kTile > gathered)
        GatherTile<Kv>(p, table, at, tile, gathered, kv_len, nullptr, p.num_dims, s.dims);
    }
    __syncthreads();
    if (scores_wanted) load_some();
  } else if (end_tile == num_tiles && warp == 0 && first_tile < end_tile) {  // this warp has the last tile in keys[0]
    if constexpr (kMma) {
      const int32_t tile = num_tiles - 1;
      auto* to = reinterpret_cast<unsigned short*>(p.batch.pool.base) +
                 CompactTile(p, compact, tile, tiles_per_page, page_elements);
      const auto* key = reinterpret_cast<const unsigned short*>(pool) + int64_t{table[tile]} * page_elements;
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // of this lane's positions
        const int slot = 8 * g + n;
        if (tile * kTile + slot < gathered || tile * kTile + slot >= kv_len) continue;
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const int i = 2 * c + (d & 1) + (d & 2) * 4;
          const uint32_t value = key[slot * p.head_dim + s.dims[i]];
          to[i * kTile + slot] = static_cast<unsigned short>(value);
          uint32_t& word = keys[0][d][n / 2];
          word = n % 2 == 0 ? (word & 0xffff0000u) | value : (word & 0xffffu) | value << 16;
        }
      }
    }
  }

  int32_t* tokens = p.tokens + stream * p.list_stride;
  if (everything) {
    for (int32_t j = begin + t; j < end; j += kThreads) tokens[j] = j;
    if (rank == 0 && t == 0) p.counts[stream] = kv_len;
    if (!scores_wanted) return;
  } else if (rank == 0 && t == 0) {
    p.counts[stream] = budget;
  }

  // Scores, then weights, of this block's positions: [group, stride], from the first position of its first tile.
  const int32_t stride = kScoresInSmem ? p.smem_scores : static_cast<int32_t>(p.scratch_stride);
  float* scores;
  if constexpr (kScoresInSmem) {
    scores = reinterpret_cast<float*>(raw + sizeof(Smem<kBlocks, kThreads>));
  } else {
    scores = p.scratch + stream * p.group * p.scratch_stride + begin;
  }
  if constexpr (kMma) {
    uint32_t b[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool exists = 8 * h + g < p.group;
      const auto* row = reinterpret_cast<const unsigned short*>(q) + (exists ? 8 * h + g : 0) * p.head_dim;
#pragma unroll
      for (int d = 0; d < 4; ++d) dims[d] = s.dims[2 * c + (d & 1) + (d & 2) * 4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t pair = row[dims[2 * k]] | static_cast<uint32_t>(row[dims[2 * k + 1]]) << 16;
        b[h][k] = exists ? pair : 0;
      }
    }
    float max[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) max[h][0] = max[h][1] = -INFINITY;
    for (int from = 0; tile_of(from) >= first_tile; from += kTiles) {
      for_each_in_flight([&](auto i) {
        const int32_t tile = tile_of(from + i);
        if (tile < first_tile) return;
        const int32_t j = tile * kTile + 8 * g;  // of this lane's eight positions
        float x[kHeadTiles][2][8];               // heads 2 c, 2 c + 1
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const uint32_t a[4] = {
              __byte_perm(keys[i][0][m], keys[i][1][m], 0x5410), __byte_perm(keys[i][0][m], keys[i][1][m], 0x7632),
              __byte_perm(keys[i][2][m], keys[i][3][m], 0x5410), __byte_perm(keys[i][2][m], keys[i][3][m], 0x7632)};
#pragma unroll
          for (int h = 0; h < kHeadTiles; ++h) {
            float r[4] = {};
            Mma16816(r, a, b[h][0], b[h][1]);
            x[h][0][2 * m] = r[0], x[h][1][2 * m] = r[1], x[h][0][2 * m + 1] = r[2], x[h][1][2 * m + 1] = r[3];
          }
        }
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int head_in_group = 8 * h + 2 * c + k;
            if (head_in_group >= p.group) continue;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              x[h][k][n] = j + n < kv_len ? x[h][k][n] * p.scale : -INFINITY;
              max[h][k] = fmaxf(max[h][k], x[h][k][n]);
            }
            auto* to = reinterpret_cast<float4*>(scores + int64_t{head_in_group} * stride + (j - begin));
            to[0] = float4{x[h][k][0], x[h][k][1], x[h][k][2], x[h][k][3]};
            to[1] = float4{x[h][k][4], x[h][k][5], x[h][k][6], x[h][k][7]};
          }
        }
        if (tile_of(from + i + kTiles) >= first_tile) load(i, tile_of(from + i + kTiles));
      });
    }
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x = max[h][k];
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
        const int head_in_group = 8 * h + 2 * c + k;
        if (g == 0 && head_in_group < p.group) s.partial[warp][head_in_group] = x;
      }
    }
  } else {
    for (int h = 0; h < p.group; ++h) {
      float max = -INFINITY;
      for (int32_t j = begin + t; j < end; j += kThreads) {
        const Kv* at = pool + CompactTile(p, compact, j / kTile, tiles_per_page, page_elements) + j % kTile;
        float dot = 0;
        for (int i = 0; i < p.num_dims; ++i)
          dot = fmaf(Load(q + h * p.head_dim + s.dims[i]), Load(at + i * kTile), dot);
        scores[int64_t{h} * stride + (j - begin)] = dot * p.scale;
        max = fmaxf(max, dot * p.scale);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
      if (lane == 0) s.partial[warp][h] = max;
    }
  }
  __syncthreads();

  const int32_t num_items = end - begin;
  constexpr int kHeadsAtOnce = 4;
  for (int first_head = 0; first_head < p.group; first_head += kHeadsAtOnce) {
    float max[kHeadsAtOnce], sum[kHeadsAtOnce];
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      const int h = min(first_head + k, p.group - 1);
      float x = s.partial[lane % kWarps][h];
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
      max[k] = x;
      sum[k] = 0;
    }
    for (int i = 4 * t; i < num_items; i += 4 * kThreads) {
#pragma unroll
      for (int k = 0; k < kHeadsAtOnce; ++k) {
        if (first_head + k >= p.group) continue;
        auto* at = reinterpret_cast<float4*>(scores + int64_t{first_head + k} * stride + i);
        float4 x = *at;
        x = float4{Exp2(x.x - max[k]), i + 1 < num_items ? Exp2(x.y - max[k]) : 0.0f,
                   i + 2 < num_items ? Exp2(x.z - max[k]) : 0.0f, i + 3 < num_items ? Exp2(x.w - max[k]) : 0.0f};
        *at = x;
        sum[k] += x.x + x.y + (x.z + x.w);
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      float x = sum[k];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
      sum[k] = x;
    }
    __syncthreads();  // every warp has read the maxima
    if (first_head == 0) C::Wait();
#pragma unroll
    for (int k = 0; k < kHeadsAtOnce; ++k) {
      const int h = first_head + k;
      if (h >= p.group) continue;
      if (lane == 0) s.partial[warp][h] = sum[k];
      if (t == 0) s.stats[rank][h].x = max[k];
    }
  }
  __syncthreads();
  for (int i = t; i < p.group * kBlocks; i += kThreads) {
    const int h = i / kBlocks, block = i % kBlocks;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += s.partial[w][h];
    const float max = s.stats[rank][h].x;
    const uint64_t both = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(max);
    C::Store(reinterpret_cast<uint64_t*>(&s.stats[rank][h]), block, both);
  }
  C::Sync();
  if (t < p.group) {
    float max = -INFINITY;
    for (int b = 0; b < kBlocks; ++b) max = fmaxf(max, s.stats[b][t].x);
    float sum = 0;
    for (int b = 0; b < kBlocks; ++b) {
      const float2 x = s.stats[b][t];
      if (x.x > -INFINITY) sum += x.y * Exp2(x.x - max);
    }
    const float mine = s.stats[rank][t].x;
    s.factor[t] = sum > 0 && mine > -INFINITY ? Exp2(mine - max) / sum : 0.0f;
    s.largest[t] = sum > 0 ? 1.0f / sum : 0.0f;
  }
  __syncthreads();
  float most = 0;
  for (int h = 0; h < p.group; ++h) most += s.largest[h];
  const ChoiceBins bins = WeightBins(most);
  // The weight of a position takes the place of its first head's score, as the key by which it is chosen.
  const int32_t first_recent = kv_len - staged.recent;
  float* weights = p.weights == nullptr ? nullptr : p.weights + stream * p.weights_stride;
  for (int i = 4 * t; i < num_items; i += 4 * kThreads) {
    float w[4] = {};
    for (int h = 0; h < p.group; ++h) {
      const float4 x = *reinterpret_cast<const float4*>(scores + int64_t{h} * stride + i);
      const float factor = s.factor[h];
      w[0] += factor * x.x, w[1] += factor * x.y, w[2] += factor * x.z, w[3] += factor * x.w;
    }
    uint32_t key[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int32_t j = begin + i + n;
      key[n] = j >= first_recent ? kForcedKey : WeightKey(w[n]);
      if (j >= end) continue;
      if (weights != nullptr) weights[j] = w[n];
      Choice::Count(s.choice, bins, key[n]);
    }
    *reinterpret_cast<uint4*>(scores + i) = uint4{key[0], key[1], key[2], key[3]};
  }
  if (everything) return;
  __syncthreads();
  Choice::Choose(
      s.choice, rank, static_cast<uint32_t>(begin), num_items, static_cast<uint32_t>(budget), bins,
      [&](int i) { return *reinterpret_cast<const uint4*>(scores + i); },
      [&](int i, int place) { tokens[place] = begin + i; });
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeadTiles, bool kScoresInSmem, typename Q, typename Kv>
__global__ void __launch_bounds__(kThreads, kThreads > 256 ? 1
                                            : kTiles > 2   ? 2
                                                           : 3) SelectKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ < 900
  if constexpr (kBlocks == 1) Select<kBlocks, kThreads, kTiles, kMma, kHeadTiles, kScoresInSmem, Q, Kv>(p);
#else
  Select<kBlocks, kThreads, kTiles, kMma, kHeadTiles, kScoresInSmem, Q, Kv>(p);
#endif
}

int64_t BlockPositions(int blocks, int32_t max_kv_len) {
  const int64_t tiles = (int64_t{max_kv_len} + kTile - 1) / kTile;
  return (tiles + blocks - 1) / blocks * kTile;
}

int64_t ScratchStride(int32_t max_kv_len) { return (int64_t{max_kv_len} + kTile - 1) / kTile * kTile; }

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeadTiles, typename Q, typename Kv>
cudaError_t Launch(const SelectArgs& a, Params p, int smem_per_block, cudaStream_t stream) {
  constexpr size_t kFixed = sizeof(Smem<kBlocks, kThreads>);
  const int64_t positions = BlockPositions(kBlocks, a.max_kv_len);
  const size_t scores = static_cast<size_t>(positions) * p.group * sizeof(float);
  const bool fits = scores <= kSmemScores && kFixed + scores <= static_cast<size_t>(smem_per_block);
  const size_t bytes = kFixed + (fits ? scores : 0);
  p.smem_scores = static_cast<int32_t>(positions);
  if (!fits && (p.scratch == nullptr)) return cudaErrorInvalidValue;
  const auto kernel = fits ? SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeadTiles, true, Q, Kv>
                           : SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeadTiles, false, Q, Kv>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (e == cudaSuccess && kBlocks > 8) {
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * a.batch.num_sequences);
  return LaunchClustersEarly(kBlocks, kernel, grid, kThreads, bytes, stream, p);
}

template <int kHeadTiles>
cudaError_t LaunchMma(const SelectArgs& a, const Params& p, int smem_per_block, cudaStream_t stream, SelectForm f) {
  if (f.cluster == 0) f = {16, 256, 4};
  using B = __nv_bfloat16;
  if (f.cluster == 16 && f.threads == 256 && f.tiles == 4)
    return Launch<16, 256, 4, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  if (f.cluster == 16 && f.threads == 256 && f.tiles == 2)
    return Launch<16, 256, 2, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  if (f.cluster == 8 && f.threads == 256 && f.tiles == 4)
    return Launch<8, 256, 4, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  if (f.cluster == 8 && f.threads == 256 && f.tiles == 2)
    return Launch<8, 256, 2, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  if (f.cluster == 8 && f.threads == 512 && f.tiles == 4)
    return Launch<8, 512, 4, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  if (f.cluster == 4 && f.threads == 512 && f.tiles == 4)
    return Launch<4, 512, 4, true, kHeadTiles, B, B>(a, p, smem_per_block, stream);
  return cudaErrorNotSupported;
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const SelectArgs& a, const Params& p, int capability, int smem_per_block,
                          cudaStream_t stream) {
  return capability >= 90 ? Launch<8, 256, 2, false, 1, Q, Kv>(a, p, smem_per_block, stream)
                          : Launch<1, 256, 2, false, 1, Q, Kv>(a, p, smem_per_block, stream);
}

}  // namespace

// Whether the scores fit in shared memory is for the launch to see; where they may not, there is room for them here.
size_t SelectScratchBytes(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len) {
  const int group = heads.num_qo_heads / std::max(heads.num_kv_heads, 1);
  int capability = 0, num_sms = 0;
  if (DeviceInfo(&capability, &num_sms) == cudaSuccess && capability >= 90 &&
      BlockPositions(8, max_kv_len) * group * int64_t{sizeof(float)} <= kSmemScores) {
    return 0;
  }
  return static_cast<size_t>(num_sequences) * heads.num_qo_heads * ScratchStride(max_kv_len) * sizeof(float);
}

cudaError_t SelectTokens(const SelectArgs& a, cudaStream_t stream, SelectForm form) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  int capability = 0, num_sms = 0, device = 0, smem_per_block = 0;
  cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (capability < 80 || a.max_kv_len > kMaxSelectKvLen || group > kMaxGroup || a.heads.head_dim > kMaxDim)
    return cudaErrorNotSupported;
  Params p{};
  p.batch = a.batch;
  p.selection = a.selection;
  p.q = a.q;
  p.q_row_stride = a.q_row_stride;
  p.tokens = a.lists.tokens;
  p.counts = a.lists.counts;
  p.list_stride = a.lists.stride;
  p.weights = a.weights;
  p.weights_stride = a.weights_stride;
  p.scratch = a.scratch;
  p.scratch_stride = ScratchStride(a.max_kv_len);
  p.dims_offset = a.dims_offset;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = group;
  p.head_dim = a.heads.head_dim;
  p.num_dims = a.num_dims;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  const bool bf16_q = a.dtype == DType::kBF16, bf16_kv = a.batch.pool.dtype == DType::kBF16;
  if (capability >= 90 && bf16_q && bf16_kv && a.num_dims == kMmaDims && group <= kMaxDecodeGroup &&
      Aligned16(a.batch.pool.base)) {
    return group <= 8 ? LaunchMma<1>(a, p, smem_per_block, stream, form)
                      : LaunchMma<2>(a, p, smem_per_block, stream, form);
  }
  using B = __nv_bfloat16;
  if (bf16_q) {
    return bf16_kv ? LaunchGeneric<B, B>(a, p, capability, smem_per_block, stream)
                   : LaunchGeneric<B, float>(a, p, capability, smem_per_block, stream);
  }
  return bf16_kv ? LaunchGeneric<float, B>(a, p, capability, smem_per_block, stream)
                 : LaunchGeneric<float, float>(a, p, capability, smem_per_block, stream);
}

}  // namespace spl::kernels::cuda
