// Column scores for Hopper: wgmma with the keys as the left operand in registers, queries by TMA.
//
// A first kernel gathers the queries of the probes head by head, with the other data of a pair beside them, so that a
// tile of 128 (probe, head) pairs is one box. The second kernel is persistent: one CTA per SM takes items (256
// columns of one KV head). A loader warp brings the item's keys and a ring of query tiles. Each of two consumer
// warpgroups keeps 128 keys in registers as two left operands of 64 and runs all tiles past them. While the weights
// exp2(...) of one half are computed, the product of the other half is on the tensor cores: for heads of 128 a product
// and its exponentials cost the same number of cycles, so neither may wait for the other.
//
// A column is a row of the left operand: its sum stays in one register of each of four lanes until the item ends.
// Tiles and pairs add up in ascending order, whatever the schedule.
#include <algorithm>
#include <type_traits>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/selection/sparsex/column_scores_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kTilePairs = 128;  // (probe, head) pairs
constexpr int kConsumers = 2;    // warpgroups
constexpr int kHalves = 2;       // pages, left operands of 64 keys, of a warpgroup
constexpr int kItemParts = kConsumers * kHalves;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kPackThreads = 256;
// Tiles without masks in a row whose products overlap; four and eight are no faster, one is a tenth slower.
[[maybe_unused]] constexpr int kUnrolledTiles = 2;
[[maybe_unused]] constexpr int kProducerRegisters = 40;
[[maybe_unused]] constexpr int kConsumerRegisters = 232;

// The data of a tile's pairs beside their queries. Pair n stands at PairIndex(n): a lane of an accumulator holds
// columns 8 i + 2 c and 8 i + 2 c + 1, and finds those of blocks i and i + 1 in 16 bytes.
struct PairTile {
  float minus_lse[kTilePairs];   // in log2; -infinity: no such pair
  int32_t position[kTilePairs];  // ascending with the pair; past the last pair, the last one's
};
__host__ __device__ constexpr int PairIndex(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2; }

struct PackParams {
  const __nv_bfloat16* q;
  int64_t q_row_stride;
  const float* lse;
  const int32_t* positions;  // positions of the sequence's rows
  const int32_t* probes;
  const int32_t* kv_heads;
  int32_t row_begin, num_qo_heads, group, num_pairs, num_tiles;
  uint4* packed;     // [KV heads][num_tiles * kTilePairs][head_dim]
  PairTile* tiles;   // [KV heads][num_tiles]
  int2* tile_range;  // [num_tiles]: positions of the first and the last pair
};

template <int kHeadDim>
__global__ void __launch_bounds__(kPackThreads) PackKernel(const __grid_constant__ PackParams p) {
  LetNextStart();
  WaitForPrevious();
  constexpr int kChunks = kHeadDim / 8;  // chunks of 16 bytes
  const int tile = blockIdx.x, head = p.kv_heads[blockIdx.y] * p.group;
  const int64_t at = static_cast<int64_t>(blockIdx.y) * p.num_tiles + tile;
  uint4* out = p.packed + at * kTilePairs * kChunks;
#pragma unroll
  for (int i = threadIdx.x; i < kTilePairs * kChunks; i += kPackThreads) {
    const int pair = tile * kTilePairs + i / kChunks;
    uint4 x{};
    if (pair < p.num_pairs) {
      const int64_t row = p.row_begin + p.probes[pair / p.group];
      x = reinterpret_cast<const uint4*>(p.q + row * p.q_row_stride +
                                         static_cast<int64_t>(head + pair % p.group) * kHeadDim)[i % kChunks];
    }
    out[i] = x;
  }
  if (threadIdx.x < kTilePairs) {
    const int n = threadIdx.x, pair = tile * kTilePairs + n;
    const int probe = p.probes[min(pair, p.num_pairs - 1) / p.group];
    PairTile& to = p.tiles[at];
    to.minus_lse[PairIndex(n)] =
        pair < p.num_pairs
            ? -kLog2e * p.lse[static_cast<int64_t>(p.row_begin + probe) * p.num_qo_heads + head + pair % p.group]
            : -INFINITY;
    to.position[PairIndex(n)] = p.positions[probe];
    if (blockIdx.y == 0 && n == 0) p.tile_range[tile].x = p.positions[probe];
    if (blockIdx.y == 0 && n == kTilePairs - 1) p.tile_range[tile].y = p.positions[probe];
  }
}

struct Params {
  PagedBatch batch;
  HeadRules rules;
  const int32_t* kv_heads;
  const ColumnPart* parts;
  const PairTile* tiles;
  const int2* tile_range;
  float* partial;  // [KV heads][num_scores]
  int32_t sequence, num_heads, num_parts, num_scores, num_tiles, num_items;
  float scale;  // sm_scale * log2(e)
};

struct Work {
  int32_t num_tiles;               // >= 1
  int32_t whole_begin, whole_end;  // in these tiles every pair sees every column of the item's pages
  int32_t head;                    // head number in the list
  Band band;
  ColumnPart part[kItemParts];  // num_slots 0: none
  bool present[kItemParts];     // the page is resident
};

// Tiles are 128-byte swizzled blocks of 64 columns.
template <int kHeadDim>
struct alignas(1024) Smem {
  static constexpr int kStages = kHeadDim == 128 ? 4 : 8;
  __nv_bfloat16 q[kStages][kHeadDim / 64][kTilePairs][64];
  __nv_bfloat16 keys[kItemParts][kHeadDim / 64][kPageTokens][64];
  PairTile pairs[kStages];
  uint64_t q_full[kStages], q_empty[kStages], keys_full, keys_empty;
  // Two: an entry is overwritten once all consumers have released the keys of the next item; by then they are through
  // with this one.
  Work work[2];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kPoolRowsPerPage = 2 * kPageTokens;  // K, then V

struct TileRanges {
  int32_t begin, end;              // tiles in which a pair sees a column; never empty: unseen columns are masked
  int32_t whole_begin, whole_end;  // see all of them
};

// All 32 lanes; columns [first, last].
__device__ inline TileRanges TilesThatSee(const Params& p, Band band, int32_t first, int32_t last) {
  const int lane = threadIdx.x % 32;
  TileRanges r{};
  for (int base = 0; base < p.num_tiles; base += 32) {
    const bool exists = base + lane < p.num_tiles;
    const int2 range = exists ? p.tile_range[base + lane] : int2{};
    const auto count = [&](bool is) { return __popc(__ballot_sync(0xffffffffu, exists && is)); };
    r.begin += count(range.y < first);
    r.end += count(first < band.sinks || range.x - last < band.window);
    r.whole_begin += count(range.x < last);
    r.whole_end += count(last < band.sinks || range.y - first < band.window);
  }
  r.begin = min(r.begin, p.num_tiles - 1);
  r.end = max(r.end, r.begin + 1);
  r.whole_begin = max(r.whole_begin, r.begin);
  r.whole_end = min(r.whole_end, r.end);
  return r;
}

template <int kHeadDim>
__device__ void LoadItems(Smem<kHeadDim>& smem, const Params& p, const CUtensorMap& q_map, const CUtensorMap& k_map) {
  constexpr int kPageBytes = kPageTokens * kHeadDim * 2, kTileBytes = kTilePairs * kHeadDim * 2;
  const int lane = threadIdx.x % 32;
  const int32_t absent_row = p.batch.pool.num_pages * kPoolRowsPerPage;
  Ring<1> keys_ring;
  Ring<2> work_ring;
  Ring<Smem<kHeadDim>::kStages> q_ring;
  for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    const int head = item % p.num_heads, first_part = item / p.num_heads * kItemParts;
    const int kv_head = p.kv_heads[head];
    const Band band = BandOf(p.rules.head[kv_head]);
    ColumnPart part{};
    int32_t row = absent_row;
    if (lane < kItemParts && first_part + lane < p.num_parts) {
      part = p.parts[first_part + lane];
      const int32_t physical =
          p.batch.page_tables[p.batch.table_offset[p.sequence] + kv_head * p.batch.head_stride + part.page];
      if (physical >= 0) row = physical * kPoolRowsPerPage;
    }
    const int last_part = min(kItemParts, p.num_parts - first_part) - 1;
    const int32_t first = __shfl_sync(0xffffffffu, part.page, 0) * kPageTokens;
    const int32_t last = __shfl_sync(0xffffffffu, part.page, last_part) * kPageTokens + kPageTokens - 1;
    const TileRanges tiles = TilesThatSee(p, band, first, last);

    MbarrierWait(SmemAddress(&smem.keys_empty), keys_ring.phase ^ 1);
    Work& work = smem.work[work_ring.stage];
    if (lane < kItemParts) {
      work.part[lane] = part;
      work.present[lane] = row != absent_row;
    }
    if (lane == 0) {
      work.num_tiles = tiles.end - tiles.begin;
      work.whole_begin = tiles.whole_begin - tiles.begin;
      work.whole_end = tiles.whole_end - tiles.begin;
      work.head = head;
      work.band = band;
    }
    __syncwarp();
    const uint32_t full = SmemAddress(&smem.keys_full);
    if (lane == 0) MbarrierArriveExpect(full, kItemParts * kPageBytes);
    __syncwarp();
    if (lane < kItemParts) TmaLoad3(SmemAddress(smem.keys[lane]), &k_map, full, 0, row, 0);
    keys_ring.Advance();
    work_ring.Advance();

    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      if (lane == 0) {
        const int stage = q_ring.stage, at = head * p.num_tiles + tile;
        const uint32_t q_full = SmemAddress(&smem.q_full[stage]);
        MbarrierWait(SmemAddress(&smem.q_empty[stage]), q_ring.phase ^ 1);
        MbarrierArriveExpect(q_full, kTileBytes + static_cast<int>(sizeof(PairTile)));
        TmaLoad3(SmemAddress(smem.q[stage]), &q_map, q_full, 0, at * kTilePairs, 0);
        BulkLoad(SmemAddress(&smem.pairs[stage]), &p.tiles[at], sizeof(PairTile), q_full);
      }
      q_ring.Advance();
    }
    __syncwarp();
  }
}

// One half's scores of a tile to weights, added to its columns' sums: rows lane / 4 and lane / 4 + 8 of the warp's 16.
template <bool kMasked>
__device__ __forceinline__ void AddWeights(const float (&s)[64], const PairTile& pairs, float scale, Band band,
                                           int32_t column, float (&sums)[2]) {
  const int c = threadIdx.x % 4;
  float even[2] = {}, odd[2] = {};
#pragma unroll
  for (int i = 0; i < kTilePairs / 16; ++i) {
    const float4 minus_lse = reinterpret_cast<const float4*>(pairs.minus_lse)[4 * i + c];
    int4 position{};
    if constexpr (kMasked) position = reinterpret_cast<const int4*>(pairs.position)[4 * i + c];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto weight = [&](float score, float base, int32_t at) {
        const float x = __fmaf_rn(score, scale, base);
        if constexpr (kMasked) {
          const int32_t mine = column + 8 * r;
          return Exp2(at >= mine && (mine < band.sinks || at - mine < band.window) ? x : -INFINITY);
        } else {
          return Exp2(x);
        }
      };
      even[r] += weight(s[8 * i + 2 * r], minus_lse.x, position.x);
      odd[r] += weight(s[8 * i + 2 * r + 1], minus_lse.y, position.y);
      even[r] += weight(s[8 * i + 4 + 2 * r], minus_lse.z, position.z);
      odd[r] += weight(s[8 * i + 4 + 2 * r + 1], minus_lse.w, position.w);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[r] += even[r] + odd[r];
}

template <int kHeadDim>
__device__ void Consume(Smem<kHeadDim>& smem, const Params& p) {
  constexpr int kSteps = kHeadDim / 16;
  const int group = threadIdx.x / 128 - 1;  // 0 or 1
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int my_slot = warp * 16 + lane / 4;
  Ring<1> keys_ring;
  Ring<2> work_ring;
  Ring<Smem<kHeadDim>::kStages> q_ring;

  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) MbarrierArrive(SmemAddress(barrier));
  };
  float s0[64], s1[64];

  for (int item = blockIdx.x; item < p.num_items; item += gridDim.x) {
    MbarrierWait(SmemAddress(&smem.keys_full), keys_ring.phase);
    uint32_t keys[kHalves][kSteps][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t from = SmemAddress(smem.keys[kHalves * group + half]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        LdMatrix4(keys[half][step], from + step / 4 * (kPageTokens * 128) +
                                        Swizzled<128>(warp * 16 + (lane & 15), step % 4 * 2 + lane / 16));
      }
    }
    const Work& work = smem.work[work_ring.stage];
    work_ring.Advance();
    release(&smem.keys_empty);
    keys_ring.Advance();

    float sums[kHalves][2] = {};
    const auto issue = [&](float(&s)[64], int half, int stage) {
      const uint32_t q = SmemAddress(smem.q[stage]);
      WgmmaPin(s);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        WgmmaRsK(s, keys[half][step], WgmmaDescriptor(q + step / 4 * (kTilePairs * 128) + step % 4 * 32, 16, 1024),
                    step != 0);
      }
      WgmmaCommit();
    };
    // kCount tiles: no product of another may be under way at a branch, or the assembler puts every product behind the
    // one in front of it.
    const auto run = [&](auto count, auto masked) {
      constexpr int kCount = decltype(count)::value;
      constexpr bool kMasked = decltype(masked)::value;
      const auto add = [&](const float(&s)[64], int half, int stage) {
        AddWeights<kMasked>(s, smem.pairs[stage], p.scale, work.band,
                            work.part[kHalves * group + half].page * kPageTokens + my_slot, sums[half]);
        // Keeps the assembler from moving these exponentials past the wait for the product that they are to hide: a
        // branch on their sum, never taken (weights are not negative).
        if (sums[half][0] < 0 || sums[half][1] < 0) __nanosleep(1);
      };
      int before = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int stage = q_ring.stage;
        MbarrierWait(SmemAddress(&smem.q_full[stage]), q_ring.phase);
        q_ring.Advance();
        issue(s0, 0, stage);
        if (i > 0) {
          WgmmaWait<1>();
          WgmmaPin(s1);
          add(s1, 1, before);
          release(&smem.q_empty[before]);
        }
        issue(s1, 1, stage);
        WgmmaWait<1>();
        WgmmaPin(s0);
        add(s0, 0, stage);
        before = stage;
      }
      WgmmaWait<0>();
      WgmmaPin(s1);
      add(s1, 1, before);
      release(&smem.q_empty[before]);
    };
    for (int tile = 0; tile < work.num_tiles;) {
      if (tile >= work.whole_begin && tile + kUnrolledTiles <= work.whole_end) {
        run(std::integral_constant<int, kUnrolledTiles>(), std::false_type());
        tile += kUnrolledTiles;
      } else {
        run(std::integral_constant<int, 1>(), std::true_type());
        ++tile;
      }
    }

#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const ColumnPart part = work.part[kHalves * group + half];
      float* out = p.partial + static_cast<int64_t>(work.head) * p.num_scores + part.offset - part.first_slot;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sums[half][r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int slot = my_slot + 8 * r;
        if (lane % 4 == 0 && slot >= part.first_slot && slot < part.first_slot + part.num_slots) {
          out[slot] = work.present[kHalves * group + half] ? sum : 0.0f;
        }
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    ColumnKernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  auto& smem = *reinterpret_cast<Smem<kHeadDim>*>(raw + (1024 - SmemAddress(raw) % 1024) % 1024);
  LetNextStart();
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * kConsumers;
    MbarrierInit(SmemAddress(&smem.keys_full), 1);
    MbarrierInit(SmemAddress(&smem.keys_empty), kWarps);
    for (int i = 0; i < Smem<kHeadDim>::kStages; ++i) {
      MbarrierInit(SmemAddress(&smem.q_full[i]), 1);
      MbarrierInit(SmemAddress(&smem.q_empty[i]), kWarps);
    }
    MbarrierInitFence();
    PrefetchTensorMap(&q_map);
    PrefetchTensorMap(&k_map);
  }
  __syncthreads();
  WaitForPrevious();
  if (threadIdx.x < 128) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x < 32) LoadItems(smem, p, q_map, k_map);
  } else {
    SetMaxRegistersUp<kConsumerRegisters>();
    Consume<kHeadDim>(smem, p);
  }
#endif
}

// The scratch behind the partial sums.
struct Scratch {
  uint4* packed;
  PairTile* tiles;
  int2* tile_range;
};
constexpr size_t Aligned(size_t bytes) { return (bytes + 127) / 128 * 128; }

int32_t NumTiles(const AttentionShape& shape, int32_t num_probes) {
  const int64_t pairs = int64_t{num_probes} * (shape.num_qo_heads / shape.num_kv_heads);
  return static_cast<int32_t>((pairs + kTilePairs - 1) / kTilePairs);
}

template <int kHeadDim>
cudaError_t LaunchColumns(const Params& p, const void* packed, int num_sms, cudaStream_t stream) {
  constexpr uint32_t kBlocks = kHeadDim / 64;
  CUtensorMap q_map, k_map;
  if (!EncodeBlocks(&q_map, packed, static_cast<uint64_t>(p.num_heads) * p.num_tiles * kTilePairs, 2 * kHeadDim,
                    kBlocks, kTilePairs, kBlocks) ||
      !EncodeBlocks(&k_map, p.batch.pool.base, uint64_t{2 * kPageTokens} * p.batch.pool.num_pages, 2 * kHeadDim,
                    kBlocks, kPageTokens, kBlocks)) {
    return cudaErrorNotSupported;
  }
  constexpr int kSmemBytes = sizeof(Smem<kHeadDim>) + 1024;
  const auto kernel = ColumnKernel<kHeadDim>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (e != cudaSuccess) return e;
  return LaunchEarly(kernel, std::min(num_sms, p.num_items), kThreads, kSmemBytes, stream, p, q_map, k_map);
}

template <int kHeadDim>
cudaError_t Launch(const PackParams& pack, const Params& p, int num_sms, cudaStream_t stream) {
  cudaError_t e = LaunchEarly(PackKernel<kHeadDim>, dim3(p.num_tiles, p.num_heads), kPackThreads, 0, stream, pack);
  if (e != cudaSuccess) return e;
  return LaunchColumns<kHeadDim>(p, pack.packed, num_sms, stream);
}

}  // namespace

size_t ColumnPackBytes(const AttentionShape& shape, int32_t num_probes, int32_t num_kv_heads) {
  const size_t tiles = static_cast<size_t>(NumTiles(shape, num_probes));
  return tiles * num_kv_heads * (kTilePairs * shape.head_dim * sizeof(__nv_bfloat16) + sizeof(PairTile)) +
         tiles * sizeof(int2);
}

cudaError_t ColumnPartialsSm90(const ColumnScoresArgs& a, const PagedBatch& batch, const int32_t* positions,
                               const ColumnTables& t, cudaStream_t stream) {
  int capability = 0, num_sms = 0;
  if (cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  const AttentionShape& shape = a.shape;
  const int64_t items = int64_t{(t.num_parts + kItemParts - 1) / kItemParts} * t.num_kv_heads;
  if (capability != 90 || a.q.dtype != DType::kBF16 || batch.pool.dtype != DType::kBF16 ||
      (shape.head_dim != 64 && shape.head_dim != 128) || !Aligned16(a.q.data) || a.q_row_stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(batch.pool.base) % 128 != 0 || batch.pool.num_pages >= (1 << 24) ||
      items >= (1 << 30)) {
    return cudaErrorNotSupported;
  }
  if (!Aligned16(t.scratch)) return cudaErrorInvalidValue;
  const int32_t num_tiles = NumTiles(shape, t.num_probes);
  const size_t partial_bytes = Aligned(static_cast<size_t>(t.num_kv_heads) * t.num_scores * sizeof(float));
  const size_t num_pairs = static_cast<size_t>(t.num_kv_heads) * num_tiles * kTilePairs;
  PackParams pack{};
  pack.q = static_cast<const __nv_bfloat16*>(a.q.data);
  pack.q_row_stride = a.q_row_stride;
  pack.lse = a.lse;
  pack.positions = positions;
  pack.probes = t.probes;
  pack.kv_heads = t.kv_heads;
  pack.row_begin = a.rows.row_begin;
  pack.num_qo_heads = shape.num_qo_heads;
  pack.group = shape.num_qo_heads / shape.num_kv_heads;
  pack.num_pairs = t.num_probes * pack.group;
  pack.num_tiles = num_tiles;
  pack.packed = reinterpret_cast<uint4*>(static_cast<std::byte*>(t.scratch) + partial_bytes);
  pack.tiles = reinterpret_cast<PairTile*>(pack.packed + num_pairs * shape.head_dim / 8);
  pack.tile_range = reinterpret_cast<int2*>(pack.tiles + static_cast<size_t>(t.num_kv_heads) * num_tiles);
  Params p{};
  p.batch = batch;
  p.rules = t.rules;
  p.kv_heads = t.kv_heads;
  p.parts = t.parts;
  p.tiles = pack.tiles;
  p.tile_range = pack.tile_range;
  p.partial = static_cast<float*>(t.scratch);
  p.sequence = a.sequence;
  p.num_heads = t.num_kv_heads;
  p.num_parts = t.num_parts;
  p.num_scores = t.num_scores;
  p.num_tiles = num_tiles;
  p.num_items = static_cast<int32_t>(items);
  p.scale = shape.sm_scale * kLog2e;
  return shape.head_dim == 64 ? Launch<64>(pack, p, num_sms, stream) : Launch<128>(pack, p, num_sms, stream);
}

}  // namespace spl::kernels::cuda
