// One cluster of blocks per stream: a block has consecutive tiles of 64 positions, scores them and takes its part in
// the choice. Each key is read once, and each exponential is taken once. The terms 2^(score - maximum of the tile) stay
// in shared memory, and those that do not fit there in scratch memory, until the factors of the tiles are known with
// which they add up to weights. A multiprocessor's shared memory holds the terms of some 13,000 positions of four query
// heads, so a cluster should be just large enough that all streams run at once. Compact keys that existed before this
// step are loaded into registers while the previous kernel still runs.
//
// The sums of exponentials are taken over units of tiles, in an order that follows from kv_len alone: clusters of
// different sizes make the same bits.
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
#include "kernels/selection/sparcas/select_tokens_cuda.h"
#include "kernels/selection/token_choice_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kTile = kPageTokens;
constexpr int kMaxGroup = 64;
constexpr int kMaxDim = 256;
constexpr int kMmaDims = 16;
constexpr int kUnits = 64;                  // at most, of a stream
constexpr int64_t kSmemSums = 32 << 10;     // bytes of a block's sums of tiles; more of them are in scratch memory
constexpr int64_t kReservedSmem = 1 << 10;  // bytes of each block that the system takes

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
  float* scratch;          // see Storage
  int64_t scratch_stride;  // floats per block
  int64_t dims_offset;
  int32_t num_kv_heads, group, head_dim, num_dims;
  int32_t block_tiles;  // the most of a block
  int32_t smem_tiles;   // tiles in shared memory
  bool smem_sums;
  float scale;  // sm_scale · log2(e)
  bool early;
};

__device__ __forceinline__ float Load(const float* p) { return *p; }
__device__ __forceinline__ float Load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

template <int kBlocks, int kThreads>
struct alignas(16) Smem {
  typename TokenChoice<kBlocks, kThreads>::Smem choice;
  float2 heads[kMaxGroup];  // per head of the stream: maximum of the scores, 1 / sum of 2^(score - maximum)
  int32_t dims[kMaxDim];    // valid in this step
  int32_t changed[kMaxDim];
  float size[kMaxDim];
  uint32_t chosen[kMaxDim / 32], fresh[kMaxDim / 32], moved[kMaxDim / 32];
  int num_changed;
};

// The data of its tiles that a block keeps between the passes.
template <bool kAllInSmem>
struct Storage {
  float2* units;       // [group, kUnits], of all blocks: maximum and sum; shared memory
  float2* all_sums;    // [tiles, group]: of a tile
  float* smem_terms;   // [smem_tiles, group, kTile]
  float* other_terms;  // terms of the tiles that do not fit there
  int32_t smem_tiles, tile_floats, group;

  // raw: the memory after Smem.
  __device__ __forceinline__ Storage(const Params& p, char* raw, int64_t block)
      : units(reinterpret_cast<float2*>(raw)),
        all_sums(units + p.group * kUnits),
        smem_tiles(p.smem_tiles),
        tile_floats(p.group * kTile),
        group(p.group) {
    smem_terms = reinterpret_cast<float*>(all_sums);
    other_terms = p.scratch + block * p.scratch_stride;
    const int64_t sums = (int64_t{p.block_tiles} * group * 2 + 3) / 4 * 4;  // floats
    if (kAllInSmem || p.smem_sums) {
      smem_terms += sums;
    } else {
      all_sums = reinterpret_cast<float2*>(other_terms);
      other_terms += sums;
    }
  }
  __device__ __forceinline__ float2* sums(int32_t tile) const { return all_sums + tile * group; }
  __device__ __forceinline__ float* tile(int32_t tile) const {
    if (kAllInSmem || tile < smem_tiles) return smem_terms + tile * tile_floats;
    return other_terms + int64_t{tile - smem_tiles} * tile_floats;
  }
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

// Without kListed every position is a candidate.
template <bool kListed>
__device__ __forceinline__ int32_t PositionOf(const Candidates& own, int32_t j) {
  if constexpr (kListed) return own.Position(j);
  return j;
}

// The key of candidate j.
template <typename Kv, bool kListed>
__device__ __forceinline__ const Kv* KeyOf(const Params& p, const int32_t* table, const Candidates& own, int32_t j) {
  const int32_t position = PositionOf<kListed>(own, j);
  return reinterpret_cast<const Kv*>(p.batch.pool.base) +
         (int64_t{table[position / kTile]} * 2 * kTile + position % kTile) * p.head_dim;
}

// Gathers `slots` of candidates [begin, end) of tile `tile`; a warp. Chosen dimensions lie all over a row: a few are
// fetched one by one, for more of them whole rows are read. stage: kGatherRows rows of this warp.
template <typename Kv, bool kListed>
__device__ __forceinline__ void GatherTile(const Params& p, const int32_t* table, const Candidates& own,
                                           int64_t tile_at, int32_t tile, int32_t begin, int32_t end,
                                           const int32_t* slots, int num_slots, const int32_t* dims, char* stage) {
  constexpr int kFewSlots = 3;
  Kv* pool = reinterpret_cast<Kv*>(p.batch.pool.base);
  Kv* to = pool + tile_at;
  const int lane = threadIdx.x % 32, row_bytes = p.head_dim * static_cast<int>(sizeof(Kv));
  begin = max(begin - tile * kTile, 0);
  end = min(end - tile * kTile, kTile);
  if (num_slots <= kFewSlots || end - begin <= kGatherRows) {
    for (int at = lane; at < (end - begin) * num_slots; at += 32) {
      const int slot = slots == nullptr ? at / (end - begin) : slots[at / (end - begin)];
      const int row = begin + at % (end - begin);
      to[slot * kTile + row] = KeyOf<Kv, kListed>(p, table, own, tile * kTile + row)[dims[slot]];
    }
    return;
  }
  const int chunks = row_bytes / 16, stride = kGatherStride(row_bytes);
  for (int first = 0; first < kTile; first += kGatherRows) {
    if (first >= end || first + kGatherRows <= begin) continue;
    const char* from = reinterpret_cast<const char*>(p.batch.pool.base);
    int64_t row_at = 0;
    if constexpr (kListed) {
      // This lane's row, for the others; past the last candidate that again.
      const int32_t at_lane = min(tile * kTile + first + lane % kGatherRows, own.count - 1);
      row_at = reinterpret_cast<const char*>(KeyOf<Kv, kListed>(p, table, own, at_lane)) - from;
    } else {
      from = reinterpret_cast<const char*>(KeyOf<Kv, kListed>(p, table, own, tile * kTile + first));
    }
    constexpr int kAtOnce = 8;  // 16 rows of 256 bytes
    for (int base = 0; base < kGatherRows * chunks; base += 32 * kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = base + 32 * n + lane;
        if constexpr (kListed) {
          const int64_t row = __shfl_sync(0xffffffffu, row_at, min(at / chunks, kGatherRows - 1));
          if (at < kGatherRows * chunks) x[n] = *reinterpret_cast<const uint4*>(from + row + at % chunks * 16);
        } else {
          if (at < kGatherRows * chunks) x[n] = *reinterpret_cast<const uint4*>(from + at * 16);
        }
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

// Where position 8 g of a tile is among the terms of a query head: the lanes of an mma that hold 4 heads write to
// different banks.
template <int kHeads>
__device__ __forceinline__ int TermSwizzle(int head) {
  return kHeads == 4 ? (head & 2) * 8 : 0;
}

// A stream's step as its block sees it.
template <typename Q>
struct Stream {
  const Q* q;  // queries of its group
  const int32_t* table;
  const int32_t* compact;
  const int32_t* dims_before;
  int32_t* dims_after;
  Candidates own;
  bool refresh, first, writes_dims;
  int32_t gathered, first_tile, end_tile;
};

// Steps (a) and (b), except for a position or a few at the end; sets s.dims. Called by all threads. Kept apart from the
// code of every step, so that it does not cost that code registers. stage: as for GatherTile, one per warp.
template <int kThreads, bool kListed, typename SmemT, typename Q, typename Kv>
__device__ __noinline__ void Gather(const Params& p, SmemT& s, const Stream<Q>& x, char* stage) {
  const int t = threadIdx.x, warp = t / 32;
  const int32_t tiles_per_page = 2 * p.head_dim / p.num_dims;
  const int64_t page_elements = int64_t{2} * kTile * p.head_dim;
  if (x.refresh) {
    ChooseDims<kThreads>(s, p, x.q, x.dims_before, x.first);
    if (x.writes_dims && t < p.num_dims) x.dims_after[t] = s.dims[t];
  } else {
    if (t < p.num_dims) s.dims[t] = x.dims_before[t];
    __syncthreads();
  }
  stage += warp * kGatherRows * kGatherStride(p.head_dim * static_cast<int>(sizeof(Kv)));
  for (int32_t tile = x.first_tile + warp; tile < x.end_tile; tile += kThreads / 32) {
    const int64_t at = CompactTile(p, x.compact, tile, tiles_per_page, page_elements);
    if (x.refresh && tile * kTile < x.gathered)
      GatherTile<Kv, kListed>(p, x.table, x.own, at, tile, 0, x.gathered, s.changed, s.num_changed, s.dims, stage);
    if (tile * kTile + kTile > x.gathered)
      GatherTile<Kv, kListed>(p, x.table, x.own, at, tile, x.gathered, x.own.count, nullptr, p.num_dims, s.dims, stage);
  }
  __syncthreads();
}

// Blocks of a multiprocessor: 512 threads of 128 registers.
constexpr int PerSm(int threads) { return std::max(512 / threads, 1); }

// kMma: bf16 throughout, 16 dimensions, at most kHeads query heads a KV head. kTiles: of a warp in flight.
// kListed: streams may be listed.
template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, bool kAllInSmem, bool kListed, typename Q,
          typename Kv>
__device__ __forceinline__ void Select(const Params& p) {
  using C = Cluster<kBlocks>;
  using Choice = TokenChoice<kBlocks, kThreads>;
  constexpr int kWarps = kThreads / 32;
  // An mma has 8 query heads; of 4 each lane takes one, of 8 two.
  constexpr int kHeadTiles = (kHeads + 7) / 8, kPerLane = kHeads == 4 ? 1 : 2;
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
  const bool listed = kListed && (step.flags & StagedStep::kListed);
  Candidates own{.count = p.batch.kv_len[sequence]};
  if constexpr (kListed) own = p.selection.CandidatesOf(sequence, head, own.count);
  const int32_t kv_len = own.count;  // from here on as if candidates were the sequence
  const int32_t budget = min(staged.budget, static_cast<int32_t>(p.list_stride));
  const bool everything = kv_len <= budget;
  const bool scores_wanted = !everything || p.weights != nullptr;
  if (scores_wanted) {
    Choice::Clear(s.choice);
    C::Arrive();  // waited for before the first write to another block, which must have started
  }
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, g = lane / 4, c = lane % 4;
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;
  const int32_t* compact = p.selection.CompactPages(sequence, head);
  const int32_t tiles_per_page = 2 * p.head_dim / p.num_dims;
  const int64_t page_elements = int64_t{2} * kTile * p.head_dim;
  const int32_t num_tiles = (kv_len + kTile - 1) / kTile, unit_tiles = (num_tiles + kUnits - 1) / kUnits;
  const int32_t num_units = (num_tiles + unit_tiles - 1) / unit_tiles;
  const int32_t first_unit = rank * num_units / kBlocks, end_unit = (rank + 1) * num_units / kBlocks;
  const int32_t first_tile = first_unit * unit_tiles, end_tile = min(end_unit * unit_tiles, num_tiles);
  const int32_t begin = first_tile * kTile, end = min(end_tile * kTile, kv_len);  // this block's positions

  const bool refresh = step.flags & StagedStep::kRefresh, first = step.flags & StagedStep::kFirst;
  const int32_t gathered = first ? 0 : step.compact_len;
  int32_t* dims_table = staged.dims + p.dims_offset + head * 2 * p.num_dims;
  const int parity = step.flags & StagedStep::kParity ? 1 : 0;
  const int32_t* dims_before = dims_table + parity * p.num_dims;
  const Q* q = static_cast<const Q*>(p.q) + sequence * p.q_row_stride + int64_t{head} * p.group * p.head_dim;
  const Kv* pool = reinterpret_cast<const Kv*>(p.batch.pool.base);
  const Storage<kAllInSmem> storage(p, raw + sizeof(Smem<kBlocks, kThreads>), blockIdx.x);
  // A step as most are: the positions to append are all in the last tile, whose other ones are there already.
  const bool plain = kMma && !refresh && gathered >= (num_tiles - 1) * kTile;

  uint32_t keys[kTiles][4][4];  // keys of this lane's dimension and word
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
  // This lane's dimensions, and its query heads' values in them.
  int32_t lane_dims[4];
  uint32_t lane_q[kHeadTiles][2];
  const auto load_q = [&] {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const bool exists = 8 * h + g < p.group;
      const auto* row = reinterpret_cast<const unsigned short*>(q) + (exists ? 8 * h + g : 0) * p.head_dim;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t pair = row[lane_dims[2 * k]] | static_cast<uint32_t>(row[lane_dims[2 * k + 1]]) << 16;
        lane_q[h][k] = exists ? pair : 0;
      }
    }
  };
  const auto dim_slot = [&](int d) { return 2 * c + (d & 1) + (d & 2) * 4; };
  int32_t last_page = 0;
  if (!p.early) WaitForPrevious();
  if (kMma && plain) {
    if (scores_wanted) load_some();
#pragma unroll
    for (int d = 0; d < 4; ++d) lane_dims[d] = dims_before[dim_slot(d)];
    if (!listed) last_page = table[num_tiles - 1];
  }
  WaitForPrevious();
  if (kMma && plain) {
    load_q();
    if (end_tile == num_tiles && warp == 0) {  // this warp has the last tile in keys[0]
      const int32_t tile = num_tiles - 1;
      auto* to = reinterpret_cast<unsigned short*>(p.batch.pool.base) +
                 CompactTile(p, compact, tile, tiles_per_page, page_elements);
      const auto* page = reinterpret_cast<const unsigned short*>(pool) + int64_t{last_page} * page_elements;
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // this lane's positions
        const int slot = 8 * g + n;
        if (tile * kTile + slot < gathered || tile * kTile + slot >= kv_len) continue;
        const auto* key = page + slot * p.head_dim;
        if (listed) key = KeyOf<unsigned short, kListed>(p, table, own, tile * kTile + slot);
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const uint32_t value = key[lane_dims[d]];
          to[dim_slot(d) * kTile + slot] = static_cast<unsigned short>(value);
          uint32_t& word = keys[0][d][n / 2];
          word = n % 2 == 0 ? (word & 0xffff0000u) | value : (word & 0xffffu) | value << 16;
        }
      }
    }
  } else {
    Gather<kThreads, kListed, Smem<kBlocks, kThreads>, Q, Kv>(
        p, s,
        {q, table, compact, dims_before, dims_table + (1 - parity) * p.num_dims, own, refresh, first, rank == 0,
         gathered, first_tile, end_tile},
        reinterpret_cast<char*>(storage.units + p.group * kUnits));  // where the sums and terms will be
    if constexpr (kMma) {
      if (scores_wanted) load_some();
#pragma unroll
      for (int d = 0; d < 4; ++d) lane_dims[d] = s.dims[dim_slot(d)];
      load_q();
    }
  }

  int32_t* tokens = p.tokens + stream * p.list_stride;
  if (everything) {
    for (int32_t j = begin + t; j < end; j += kThreads) tokens[j] = PositionOf<kListed>(own, j);
    if (rank == 0 && t == 0) p.counts[stream] = kv_len;
    if (!scores_wanted) return;
  } else if (rank == 0 && t == 0) {
    p.counts[stream] = budget;
  }

  // First every weight is a sum over query heads of 2^(score - maximum of the tile), factors missing.
  const auto tile_sums = [&](int32_t tile) { return storage.sums(tile - first_tile); };
  if constexpr (kMma) {
    for (int from = 0; tile_of(from) >= first_tile; from += kTiles) {
      for_each_in_flight([&](auto i) {
        const int32_t tile = tile_of(from + i);
        if (tile < first_tile) return;
        float2* sums = tile_sums(tile);
        float* terms = storage.tile(tile - first_tile);
        const int32_t left = kv_len - tile * kTile - 8 * g;  // how many positions are left for this lane
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
          float x[2][8];  // products of positions 8 g + n and query heads 8 h + 2 c + k
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const uint32_t a[4] = {
                __byte_perm(keys[i][0][m], keys[i][1][m], 0x5410), __byte_perm(keys[i][0][m], keys[i][1][m], 0x7632),
                __byte_perm(keys[i][2][m], keys[i][3][m], 0x5410), __byte_perm(keys[i][2][m], keys[i][3][m], 0x7632)};
            float r[4] = {};
            Mma16816(r, a, lane_q[h][0], lane_q[h][1]);
            x[0][2 * m] = r[0], x[1][2 * m] = r[1], x[0][2 * m + 1] = r[2], x[1][2 * m + 1] = r[3];
          }
          if (h == kHeadTiles - 1 && tile_of(from + i + kTiles) >= first_tile) load(i, tile_of(from + i + kTiles));
          if constexpr (kPerLane == 1) {  // the second head of lanes 0 and 1 of a quad goes to lanes 2 and 3
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              const float other = __shfl_xor_sync(0xffffffffu, x[1][n], 2);
              x[0][n] = c < 2 ? x[0][n] : other;
            }
          }
#pragma unroll
          for (int k = 0; k < kPerLane; ++k) {
            float max = -INFINITY;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              x[k][n] = n < left ? x[k][n] * p.scale : -INFINITY;
              max = fmaxf(max, x[k][n]);
            }
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
            const int head_in_group = kPerLane == 1 ? 2 * (c & 1) + (c >> 1) : 8 * h + 2 * c + k;
            const bool exists = head_in_group < p.group;
            const float base = max == -INFINITY ? 0.0f : max;
            float sum = 0;
            if (exists) {
#pragma unroll
              for (int n = 0; n < 8; ++n) sum += x[k][n] = Exp2(x[k][n] - base);
              // The halves in an order that keeps the lanes of a quad in different banks.
              float4* to = reinterpret_cast<float4*>(terms + head_in_group * kTile +
                                                     ((8 * g) ^ TermSwizzle<kHeads>(head_in_group)));
              const bool swap = kPerLane == 1 ? c & 2 : c & 1;
              const float4 low{x[k][0], x[k][1], x[k][2], x[k][3]}, high{x[k][4], x[k][5], x[k][6], x[k][7]};
              to[swap ? 1 : 0] = swap ? high : low;
              to[swap ? 0 : 1] = swap ? low : high;
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (exists && g == 0) sums[head_in_group] = float2{max, sum};
          }
        }
      });
    }
  } else {
    for (int32_t tile = end_tile - 1 - warp; tile >= first_tile; tile -= kWarps) {
      float2* sums = tile_sums(tile);
      float* terms = storage.tile(tile - first_tile);
      const Kv* keys_of = pool + CompactTile(p, compact, tile, tiles_per_page, page_elements);
      for (int h = 0; h < p.group; ++h) {
        float x[2];
        float max = -INFINITY;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int slot = lane + 32 * k;
          x[k] = -INFINITY;
          if (tile * kTile + slot < kv_len) {
            float dot = 0;
            for (int i = 0; i < p.num_dims; ++i)
              dot = fmaf(Load(q + h * p.head_dim + s.dims[i]), Load(keys_of + i * kTile + slot), dot);
            x[k] = dot * p.scale;
          }
          max = fmaxf(max, x[k]);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
        const float base = max == -INFINITY ? 0.0f : max;
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) sum += terms[h * kTile + lane + 32 * k] = Exp2(x[k] - base);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0) sums[h] = float2{max, sum};
      }
    }
  }
  __syncthreads();

  // Then the factors: the sums of units, which follow from kv_len alone, in every block in the same order.
  float2* units = storage.units;
  C::Wait();
  constexpr int kTogether = 8;  // lanes of a unit and head
  const int num_sums = (end_unit - first_unit) * p.group;
#pragma unroll 1
  for (int first_sum = 0; first_sum < num_sums; first_sum += kThreads / kTogether) {
    const int i = first_sum + t / kTogether;
    const int unit = first_unit + min(i, num_sums - 1) / p.group, h = i % p.group;
    const int32_t to = min((unit + 1) * unit_tiles, num_tiles);
    float max = -INFINITY, sum = 0;
    for (int32_t tile = unit * unit_tiles + t % kTogether; tile < to; tile += kTogether) {
      const float2 x = tile_sums(tile)[h];
      const float next = fmaxf(max, x.x);
      sum = next == -INFINITY ? 0 : sum * Exp2(max - next) + x.y * Exp2(x.x - next);
      max = next;
    }
    float most = max;
#pragma unroll
    for (int offset = kTogether / 2; offset > 0; offset /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    sum = most == -INFINITY ? 0 : sum * Exp2(max - most);
#pragma unroll
    for (int offset = kTogether / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const uint64_t both = static_cast<uint64_t>(__float_as_uint(sum)) << 32 | __float_as_uint(most);
    if (i >= num_sums) continue;
#pragma unroll 1
    for (int block = t % kTogether; block < kBlocks; block += kTogether)
      C::Store(reinterpret_cast<uint64_t*>(&units[h * kUnits + unit]), block, both);
  }
  C::Sync();
  for (int h = warp; h < p.group; h += kWarps) {
    float max = -INFINITY, sum = 0;
    float2 mine[kUnits / 32];
#pragma unroll
    for (int i = 0; i < kUnits / 32; ++i) {
      const int unit = 32 * i + lane;
      mine[i] = unit < num_units ? units[h * kUnits + unit] : float2{-INFINITY, 0};
      max = fmaxf(max, mine[i].x);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    if (max > -INFINITY) {
#pragma unroll
      for (int i = 0; i < kUnits / 32; ++i) sum += mine[i].y * Exp2(mine[i].x - max);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) s.heads[h] = float2{max, sum > 0 ? 1.0f / sum : 0.0f};
  }
  __syncthreads();

  // Then the weights, and in the place of the first head's terms the key by which each is chosen.
  const int32_t first_recent = kv_len - staged.recent;
  float* weights = p.weights == nullptr ? nullptr : p.weights + stream * p.weights_stride;
  const ChoiceBins bins = WeightBins(static_cast<float>(p.group), budget - staged.recent);
  constexpr int kHalf = 16;  // lanes of a tile, four positions each
  for (int32_t i = t / kHalf; i < end_tile - first_tile; i += kThreads / kHalf) {
    const int slot = lane % kHalf * 4;
    const int32_t j = (first_tile + i) * kTile + slot;
    float* terms = storage.tile(i) + slot;
    const float2* sums = storage.sums(i);
    float w[4] = {};
    const auto add = [&](int h) {
      const float2 head = s.heads[h];
      const float factor = Exp2(sums[h].x - head.x) * head.y;
      const float4 x = *reinterpret_cast<const float4*>(terms + h * kTile + ((slot ^ TermSwizzle<kHeads>(h)) - slot));
      w[0] = fmaf(x.x, factor, w[0]);
      w[1] = fmaf(x.y, factor, w[1]);
      w[2] = fmaf(x.z, factor, w[2]);
      w[3] = fmaf(x.w, factor, w[3]);
    };
    if (kHeads == 4 && p.group == 4) {
#pragma unroll
      for (int h = 0; h < 4; ++h) add(h);
    } else {
#pragma unroll 1
      for (int h = 0; h < p.group; ++h) add(h);
    }
    uint32_t key[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      key[n] = j + n >= first_recent ? kForcedKey : WeightKey(w[n]);
      if (j + n >= end) continue;
      if (weights != nullptr) weights[j + n] = w[n];
      Choice::Count(s.choice, bins, key[n]);
    }
    *reinterpret_cast<uint4*>(terms) = uint4{key[0], key[1], key[2], key[3]};
  }
  if (everything) return;
  // Computed again: keeping it would take too many registers until here.
  const Candidates listed_ones =
      listed ? p.selection.CandidatesOf(sequence, head, p.batch.kv_len[sequence]) : Candidates{.count = kv_len};
  Choice::Choose(
      s.choice, rank, static_cast<uint32_t>(begin), end - begin, static_cast<uint32_t>(budget), bins,
      [&](int i) { return reinterpret_cast<const uint32_t*>(storage.tile(i / kTile))[i % kTile]; },
      [&](int tile) { return reinterpret_cast<uint32_t*>(storage.tile(tile)); },
      [&](int i, int place) { tokens[place] = listed ? listed_ones.Position(begin + i) : begin + i; });
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, bool kAllInSmem, bool kListed, typename Q,
          typename Kv>
__global__ void __launch_bounds__(kThreads, PerSm(kThreads)) SelectKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ < 900
  if constexpr (kBlocks == 1) Select<kBlocks, kThreads, kTiles, kMma, kHeads, kAllInSmem, kListed, Q, Kv>(p);
#else
  Select<kBlocks, kThreads, kTiles, kMma, kHeads, kAllInSmem, kListed, Q, Kv>(p);
#endif
}

bool ServedByMma(const SelectArgs& a, int capability) {
  return capability >= 90 && a.dtype == DType::kBF16 && a.batch.pool.dtype == DType::kBF16 && a.num_dims == kMmaDims &&
         a.heads.num_qo_heads / a.heads.num_kv_heads <= kMaxDecodeGroup && Aligned16(a.batch.pool.base);
}

struct Device {
  int capability = 0, num_sms = 0, smem_per_block = 0, smem_per_sm = 0;
};
cudaError_t Find(Device& d) {
  int device = 0;
  cudaError_t e = DeviceInfo(&d.capability, &d.num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return e;
}

// How blocks keep their tiles; depends on the launch arguments only.
struct Layout {
  int32_t block_tiles = 0, smem_tiles = 0;
  bool smem_sums = false;
  size_t smem_bytes = 0;
  int64_t scratch_stride = 0;  // floats of a block
};
Layout LayoutOf(const SelectArgs& a, const Device& d, int blocks, int threads, size_t fixed, size_t element) {
  const int64_t group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  const int64_t tiles = (int64_t{a.max_kv_len} + kTile - 1) / kTile, unit = (tiles + kUnits - 1) / kUnits;
  const int64_t block_tiles = (kUnits + blocks - 1) / blocks * unit;
  Layout l;
  l.block_tiles = static_cast<int32_t>(block_tiles);
  const int64_t sums = (block_tiles * group * 2 + 3) / 4 * 4, tile = group * kTile;  // floats
  l.smem_sums = sums * 4 <= kSmemSums;
  const int64_t most = std::min<int64_t>(d.smem_per_block, d.smem_per_sm / PerSm(threads) - kReservedSmem);
  const int64_t used = static_cast<int64_t>(fixed) + group * kUnits * 8 + (l.smem_sums ? sums * 4 : 0);
  l.smem_tiles = static_cast<int32_t>(std::clamp<int64_t>((most - used) / (tile * 4), 0, block_tiles));
  l.scratch_stride = (l.smem_sums ? 0 : sums) + (block_tiles - l.smem_tiles) * tile;
  const auto stages = static_cast<int64_t>(size_t{threads / 32u} * kGatherRows *
                                           kGatherStride(a.heads.head_dim * static_cast<int>(element)));
  l.smem_bytes = static_cast<size_t>(
      std::max(used + l.smem_tiles * tile * 4, static_cast<int64_t>(fixed) + group * kUnits * 8 + stages));
  return l;
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, typename Q, typename Kv>
Layout LayoutOf(const SelectArgs& a, const Device& d) {
  return LayoutOf(a, d, kBlocks, kThreads, sizeof(Smem<kBlocks, kThreads>), sizeof(Kv));
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, typename Q, typename Kv>
cudaError_t Launch(const SelectArgs& a, Params p, const Device& d, cudaStream_t stream) {
  static_assert(sizeof(Smem<kBlocks, kThreads>) % 16 == 0);
  const Layout l = LayoutOf<kBlocks, kThreads, kTiles, kMma, kHeads, Q, Kv>(a, d);
  p.block_tiles = l.block_tiles;
  p.smem_tiles = l.smem_tiles;
  p.smem_sums = l.smem_sums;
  p.scratch_stride = l.scratch_stride;
  if (l.scratch_stride > 0 && p.scratch == nullptr) return cudaErrorInvalidValue;
  // A kernel that serves lists also serves the other sequences, but takes 3 to 6 % longer: used only if one is listed.
  auto kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, false, true, Q, Kv>;
  if constexpr (kMma) {
    if (!a.listed) kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, false, false, Q, Kv>;
  }
  if constexpr (kMma && kHeads == 4 && kBlocks == 8) {
    if (!a.listed && l.scratch_stride == 0)
      kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, true, false, Q, Kv>;
  }
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * a.batch.num_sequences);
  return LaunchClustersEarly(kBlocks, kernel, grid, kThreads, l.smem_bytes, stream, p);
}

// As large as leaves room for all streams at once. A cluster must fit among the multiprocessors of one part of the
// chip, so that not all of them find a place: 14 or 15 clusters of 8 run at once on 132.
SelectForm AutoForm(const SelectArgs& a, const Device& d) {
  const int64_t streams = int64_t{a.batch.num_sequences} * a.heads.num_kv_heads;
  for (const int cluster : {8, 4}) {
    if (streams * cluster <= d.num_sms * 7 / 8) return {cluster, 512, 2};
  }
  return {2, 512, 2};
}

// Calls body<kBlocks, kThreads, kTiles, kHeads>() with the form for the arguments. False: no form fits.
template <typename Body>
bool WithForm(const SelectArgs& a, const Device& d, SelectForm f, const Body& body) {
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (f.cluster == 0) f = AutoForm(a, d);
  const auto is = [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
    if (f.cluster != kBlocks || f.threads != kThreads || f.tiles != kTiles) return false;
    body.template operator()<kBlocks, kThreads, kTiles, kHeads>();
    return true;
  };
  if (group <= 4) {
    return is.template operator()<8, 512, 2, 4>() || is.template operator()<4, 512, 2, 4>() ||
           is.template operator()<2, 512, 2, 4>();
  }
  f = {f.cluster > 4 ? 8 : 2, 512, 2};
  return is.template operator()<8, 512, 2, 16>() || is.template operator()<2, 512, 2, 16>();
}

cudaError_t LaunchMma(const SelectArgs& a, const Params& p, const Device& d, cudaStream_t stream, SelectForm form) {
  using B = __nv_bfloat16;
  cudaError_t e = cudaErrorNotSupported;
  WithForm(a, d, form, [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
    e = Launch<kBlocks, kThreads, kTiles, true, kHeads, B, B>(a, p, d, stream);
  });
  return e;
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const SelectArgs& a, const Params& p, const Device& d, cudaStream_t stream) {
  return d.capability >= 90 ? Launch<8, 256, 2, false, 8, Q, Kv>(a, p, d, stream)
                            : Launch<1, 256, 2, false, 8, Q, Kv>(a, p, d, stream);
}

template <typename Kv>
Layout GenericLayout(const SelectArgs& a, const Device& d) {
  return d.capability >= 90 ? LayoutOf<8, 256, 2, false, 8, Kv, Kv>(a, d) : LayoutOf<1, 256, 2, false, 8, Kv, Kv>(a, d);
}

}  // namespace

size_t SelectScratchBytes(const SelectArgs& a, SelectForm form) {
  Device d;
  if (Find(d) != cudaSuccess) return 0;  // the launch will say so
  int blocks = d.capability >= 90 ? 8 : 1;
  Layout l;
  if (ServedByMma(a, d.capability)) {
    WithForm(a, d, form, [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
      l = LayoutOf<kBlocks, kThreads, kTiles, true, kHeads, __nv_bfloat16, __nv_bfloat16>(a, d);
      blocks = kBlocks;
    });
  } else {
    l = a.batch.pool.dtype == DType::kBF16 ? GenericLayout<__nv_bfloat16>(a, d) : GenericLayout<float>(a, d);
  }
  return static_cast<size_t>(a.batch.num_sequences) * a.heads.num_kv_heads * blocks * l.scratch_stride * sizeof(float);
}

cudaError_t SelectTokens(const SelectArgs& a, cudaStream_t stream, SelectForm form) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  Device d;
  if (const cudaError_t e = Find(d); e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (d.capability < 80 || a.max_kv_len > kMaxSelectKvLen || group > kMaxGroup || a.heads.head_dim > kMaxDim)
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
  p.dims_offset = a.dims_offset;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = group;
  p.head_dim = a.heads.head_dim;
  p.num_dims = a.num_dims;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  const bool bf16_q = a.dtype == DType::kBF16, bf16_kv = a.batch.pool.dtype == DType::kBF16;
  if (ServedByMma(a, d.capability)) return LaunchMma(a, p, d, stream, form);
  using B = __nv_bfloat16;
  if (bf16_q) return bf16_kv ? LaunchGeneric<B, B>(a, p, d, stream) : LaunchGeneric<B, float>(a, p, d, stream);
  return bf16_kv ? LaunchGeneric<float, B>(a, p, d, stream) : LaunchGeneric<float, float>(a, p, d, stream);
}

}  // namespace spl::kernels::cuda
