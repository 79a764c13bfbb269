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
constexpr int64_t kSmemScores = 128 << 10;  // bytes that a block of sm_90 may have for its scores or keys
constexpr int kFewestBlocks = 4;            // a stream, of all forms for sm_90

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
struct alignas(16) Smem {
  typename TokenChoice<kBlocks, kThreads>::Smem choice;
  // Of each block, and of each warp of this block, and query head: maximum of the scores, sum of 2^(score - maximum).
  float2 stats[kBlocks][kMaxGroup];
  float2 warp_stats[kThreads / 32][kMaxGroup];
  float max[kMaxGroup], inverse[kMaxGroup];  // of the stream: maximum, 1 / sum
  int32_t dims[kMaxDim];                     // valid in this step
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

// Keys pass through shared memory 16 rows at a time; a row's stride is that of 16-byte chunks, with one more so that
// the rows of a dimension lie in different banks.
constexpr int kGatherRows = 16;
constexpr int kGatherStride(int row_bytes) { return row_bytes + 16; }

// Gathers `slots` of positions [begin, end) of tile `tile`; a warp. Chosen dimensions lie all over a row: a few are
// fetched one by one, for more of them whole rows are read. stage: kGatherRows rows of this warp.
template <typename Kv>
__device__ __forceinline__ void GatherTile(const Params& p, const int32_t* table, int64_t tile_at, int32_t tile,
                                           int32_t begin, int32_t end, const int32_t* slots, int num_slots,
                                           const int32_t* dims, char* stage) {
  constexpr int kFewSlots = 3;
  Kv* pool = reinterpret_cast<Kv*>(p.batch.pool.base);
  const Kv* keys = pool + int64_t{table[tile]} * 2 * kTile * p.head_dim;
  Kv* to = pool + tile_at;
  const int lane = threadIdx.x % 32, row_bytes = p.head_dim * static_cast<int>(sizeof(Kv));
  begin = max(begin - tile * kTile, 0);
  end = min(end - tile * kTile, kTile);
  if (num_slots <= kFewSlots || end - begin <= kGatherRows) {
    for (int at = lane; at < (end - begin) * num_slots; at += 32) {
      const int slot = slots == nullptr ? at / (end - begin) : slots[at / (end - begin)];
      const int row = begin + at % (end - begin);
      to[slot * kTile + row] = keys[row * p.head_dim + dims[slot]];
    }
    return;
  }
  const int chunks = row_bytes / 16, stride = kGatherStride(row_bytes);
  for (int first = 0; first < kTile; first += kGatherRows) {
    if (first >= end || first + kGatherRows <= begin) continue;
    const char* from = reinterpret_cast<const char*>(keys) + first * row_bytes;
    constexpr int kAtOnce = 8;  // 16 rows of 256 bytes
    for (int base = 0; base < kGatherRows * chunks; base += 32 * kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = base + 32 * n + lane;
        if (at < kGatherRows * chunks) x[n] = *reinterpret_cast<const uint4*>(from + at * 16);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = base + 32 * n + lane;
        if (at < kGatherRows * chunks)
          *reinterpret_cast<uint4*>(stage + at / chunks * stride + at % chunks * 16) = x[n];
      }
    }
    __syncwarp();
    const int row = first + lane % kGatherRows;
    for (int i = lane / kGatherRows; i < num_slots; i += 32 / kGatherRows) {
      const int slot = slots == nullptr ? i : slots[i];
      const Kv x = reinterpret_cast<const Kv*>(stage + lane % kGatherRows * stride)[dims[slot]];
      if (row >= begin && row < end) to[slot * kTile + row] = x;
    }
    __syncwarp();
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
  if (!p.selection.Selects(sequence, head)) {
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
    // Where the scores will be.
    char* stage = raw + sizeof(Smem<kBlocks, kThreads>) +
                  warp * kGatherRows * kGatherStride(p.head_dim * static_cast<int>(sizeof(Kv)));
    for (int32_t tile = first_tile + warp; tile < end_tile; tile += kWarps) {
      const int64_t at = CompactTile(p, compact, tile, tiles_per_page, page_elements);
      if (refresh && tile * kTile < gathered)
        GatherTile<Kv>(p, table, at, tile, 0, gathered, s.changed, s.num_changed, s.dims, stage);
      if (tile * kTile + kTile > gathered)
        GatherTile<Kv>(p, table, at, tile, gathered, kv_len, nullptr, p.num_dims, s.dims, stage);
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

  const int32_t num_items = end - begin;
  const int32_t first_recent = kv_len - staged.recent;
  float* weights = p.weights == nullptr ? nullptr : p.weights + stream * p.weights_stride;
  // Of this block's positions: the key by which each is chosen; before that, without kMma, the scores, [group, stride].
  const int32_t stride = kScoresInSmem ? p.smem_scores : static_cast<int32_t>(p.scratch_stride);
  float* scores;
  if constexpr (kScoresInSmem) {
    scores = reinterpret_cast<float*>(raw + sizeof(Smem<kBlocks, kThreads>));
  } else {
    scores = p.scratch + stream * (kMma ? 1 : p.group) * p.scratch_stride + begin;
  }
  // All threads, once the warps' statistics are there: makes them the stream's.
  const auto share_stats = [&] {
    __syncthreads();
    C::Wait();
    for (int i = t; i < p.group * kBlocks; i += kThreads) {
      const int h = i / kBlocks, block = i % kBlocks;
      float max = -INFINITY, sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s.warp_stats[w][h].x);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 x = s.warp_stats[w][h];
        if (x.x > -INFINITY) sum += x.y * Exp2(x.x - max);
      }
      const uint64_t both = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(max);
      C::Store(reinterpret_cast<uint64_t*>(&s.stats[rank][h]), block, both);
    }
    C::Sync();
    if (t < p.group) {
      float max = -INFINITY, sum = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) max = fmaxf(max, s.stats[b][t].x);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float2 x = s.stats[b][t];
        if (x.x > -INFINITY) sum += x.y * Exp2(x.x - max);
      }
      s.max[t] = max;
      s.inverse[t] = sum > 0 ? 1.0f / sum : 0.0f;
    }
    __syncthreads();
    float most = 0;  // no weight is above
    for (int h = 0; h < p.group; ++h) most += s.inverse[h];
    return WeightBins(most);
  };
  const auto take = [&](const ChoiceBins& bins, int32_t j, float w) {
    const uint32_t key = j >= first_recent ? kForcedKey : WeightKey(w);
    if (j < end) {
      if (weights != nullptr) weights[j] = w;
      Choice::Count(s.choice, bins, key);
    }
    return key;
  };
  ChoiceBins bins{};
  if constexpr (kMma) {
    uint32_t b[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool exists = 8 * h + g < p.group;
      const auto* row = reinterpret_cast<const unsigned short*>(q) + (exists ? 8 * h + g : 0) * p.head_dim;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = 2 * c + 8 * k;
        const uint32_t pair = row[s.dims[i]] | static_cast<uint32_t>(row[s.dims[i + 1]]) << 16;
        b[h][k] = exists ? pair : 0;
      }
    }
    // body(i, tile, x): x[h][k][n] is the score of position 64 tile + 8 g + n for query head 8 h + 2 c + k. The
    // products are made twice, for the statistics and for the weights: they cost less than keeping their results.
    const auto for_each_tile = [&](const auto& body) {
      for (int from = 0; tile_of(from) >= first_tile; from += kTiles) {
        for_each_in_flight([&](auto i) {
          const int32_t tile = tile_of(from + i);
          if (tile < first_tile) return;
          float x[kHeadTiles][2][8];
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
          const int32_t j = tile * kTile + 8 * g;
#pragma unroll
          for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
              for (int n = 0; n < 8; ++n) x[h][k][n] = j + n < kv_len ? x[h][k][n] * p.scale : -INFINITY;
            }
          }
          if (tile_of(from + i + kTiles) >= first_tile) load(i, tile_of(from + i + kTiles));
          body(tile, x);
        });
      }
    };
    float max[kHeadTiles][2], sum[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) max[h][0] = max[h][1] = -INFINITY, sum[h][0] = sum[h][1] = 0;
    for_each_tile([&](int32_t, const float(&x)[kHeadTiles][2][8]) {
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (8 * h + 2 * c + k >= p.group) continue;
          float next = max[h][k];
#pragma unroll
          for (int n = 0; n < 8; ++n) next = fmaxf(next, x[h][k][n]);
          const float base = next == -INFINITY ? 0.0f : next;
          float added = 0;
#pragma unroll
          for (int n = 0; n < 8; ++n) added += Exp2(x[h][k][n] - base);
          sum[h][k] = sum[h][k] * Exp2(max[h][k] - base) + added;
          max[h][k] = next;
        }
      }
    });
    if (tile_of(kTiles) >= first_tile) load_some();  // more than fit: from the start again
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float most = max[h][k];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 4));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
        float total = most == -INFINITY ? 0.0f : sum[h][k] * Exp2(max[h][k] - most);
        total += __shfl_xor_sync(0xffffffffu, total, 4);
        total += __shfl_xor_sync(0xffffffffu, total, 8);
        total += __shfl_xor_sync(0xffffffffu, total, 16);
        const int head_in_group = 8 * h + 2 * c + k;
        if (g == 0 && head_in_group < p.group) s.warp_stats[warp][head_in_group] = float2{most, total};
      }
    }
    bins = share_stats();
    float inverse[kHeadTiles][2];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int head_in_group = 8 * h + 2 * c + k;
        const bool exists = head_in_group < p.group;
        max[h][k] = exists ? s.max[head_in_group] : 0.0f;
        inverse[h][k] = exists ? s.inverse[head_in_group] : 0.0f;
      }
    }
    for_each_tile([&](int32_t tile, const float(&x)[kHeadTiles][2][8]) {
      float w[8] = {};
#pragma unroll
      for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (8 * h + 2 * c + k >= p.group) continue;
#pragma unroll
          for (int n = 0; n < 8; ++n) w[n] += inverse[h][k] * Exp2(x[h][k][n] - max[h][k]);
        }
      }
      __syncwarp();
      // The sum over the lanes of a quad; lane c has positions 2 c and 2 c + 1 in the end.
      float half[4], mine[2];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float sent = __shfl_xor_sync(0xffffffffu, c & 2 ? w[n] : w[4 + n], 2);
        half[n] = (c & 2 ? w[4 + n] : w[n]) + sent;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float sent = __shfl_xor_sync(0xffffffffu, c & 1 ? half[n] : half[2 + n], 1);
        mine[n] = (c & 1 ? half[2 + n] : half[n]) + sent;
      }
      const int32_t j = tile * kTile + 8 * g + 2 * c;
      const uint32_t first_key = take(bins, j, mine[0]), second_key = take(bins, j + 1, mine[1]);
      *reinterpret_cast<uint2*>(scores + (j - begin)) = uint2{first_key, second_key};
    });
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
      const float base = max == -INFINITY ? 0.0f : max;  // of the warp
      float sum = 0;
      for (int32_t j = begin + t; j < end; j += kThreads) sum += Exp2(scores[int64_t{h} * stride + (j - begin)] - base);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane == 0) s.warp_stats[warp][h] = float2{max, sum};
    }
    bins = share_stats();
    for (int32_t i = t; i < num_items; i += kThreads) {
      float w = 0;
      for (int h = 0; h < p.group; ++h) w += s.inverse[h] * Exp2(scores[int64_t{h} * stride + i] - s.max[h]);
      *reinterpret_cast<uint32_t*>(scores + i) = take(bins, begin + i, w);
    }
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

bool ServedByMma(const SelectArgs& a, int capability) {
  return capability >= 90 && a.dtype == DType::kBF16 && a.batch.pool.dtype == DType::kBF16 && a.num_dims == kMmaDims &&
         a.heads.num_qo_heads / a.heads.num_kv_heads <= kMaxDecodeGroup && Aligned16(a.batch.pool.base);
}

int64_t BlockPositions(int blocks, int32_t max_kv_len) {
  const int64_t tiles = (int64_t{max_kv_len} + kTile - 1) / kTile;
  return (tiles + blocks - 1) / blocks * kTile;
}

int64_t ScratchStride(int32_t max_kv_len) { return (int64_t{max_kv_len} + kTile - 1) / kTile * kTile; }

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeadTiles, typename Q, typename Kv>
cudaError_t Launch(const SelectArgs& a, Params p, int smem_per_block, cudaStream_t stream) {
  constexpr size_t kFixed = sizeof(Smem<kBlocks, kThreads>);
  static_assert(kFixed % 16 == 0);
  const int64_t positions = BlockPositions(kBlocks, a.max_kv_len);
  const size_t scores = static_cast<size_t>(positions) * (kMma ? 1 : p.group) * sizeof(float);
  const bool fits = scores <= kSmemScores && kFixed + scores <= static_cast<size_t>(smem_per_block);
  const size_t stages = size_t{kThreads / 32} * kGatherRows * kGatherStride(p.head_dim * static_cast<int>(sizeof(Kv)));
  const size_t bytes = kFixed + std::max(fits ? scores : 0, stages);
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
  if (f.cluster == 0) f = {8, 512, 4};
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

size_t SelectScratchBytes(const SelectArgs& a) {
  int capability = 0, num_sms = 0;
  if (DeviceInfo(&capability, &num_sms) != cudaSuccess) return 0;  // the launch will say so
  const int words = ServedByMma(a, capability) ? 1 : a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (capability >= 90 && BlockPositions(kFewestBlocks, a.max_kv_len) * words * int64_t{sizeof(float)} <= kSmemScores)
    return 0;
  return static_cast<size_t>(a.batch.num_sequences) * a.heads.num_kv_heads * words * ScratchStride(a.max_kv_len) *
         sizeof(float);
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
  if (ServedByMma(a, capability)) {
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
