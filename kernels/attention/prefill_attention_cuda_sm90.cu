// Prefill attention for Hopper: TMA loads pages, two consumer warpgroups of 64 query rows each run wgmma.
//
// One CTA per SM takes tiles (128 rows of one query head) from a counter, long ones first. A planner warp finds the
// next tile and its first pages while a loader warp walks the pages that this one sees and keeps two rings of 128-token
// K and V stages full (consumers: prefill_consumer_sm90.h).
//
// K and V tiles start at multiples of 128 positions whatever the query tile, and a key that a row does not see changes
// none of its numbers (weight exactly 0, rescale exactly 1): that is what makes a row's result independent of its tile.
#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/prefill_consumer_sm90.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kLookUps = 16;  // candidates (pairs of pages) that a warp looks up at a time
static_assert(kTileRows == kConsumers * kConsumerRows);

// What consumers need to know of a tile.
struct Work {
  int32_t row;
  int32_t num_rows;  // < 0: no more tiles
  int32_t qo_head;
  int32_t kv_len;
  int32_t low, high;  // positions of the first and the last row (the loader's business)
  Band band;
};

// What the planner hands to the loader.
struct Plan {
  Work work;
  const int32_t* table;
  unsigned seen;                   // bit 2 i + j: page j of candidate i is seen
  int32_t pool_row[2 * kLookUps];  // where it starts in the pool, as a matrix of rows
};

// q: [block][kTileRows][64].
template <int kHeadDim>
struct alignas(1024) Smem : PrefillSmem<kHeadDim, Work> {
  uint64_t plan_full, plan_empty;
  int32_t k_tile[kStages];  // KTile
  Plan plan;
};

// A K stage's word: the logical tile above these bits.
enum KTile : int32_t { kLast = 1, kNeedsMask = 2, kFirstAbsent = 4, kSecondAbsent = 8, kTileShift = 4 };

struct Params {
  Schedule schedule;
  HeadRules rules;
  PagedBatch batch;
  RowRanges rows;
  const int32_t* positions;
  __nv_bfloat16* out;
  float* lse;
  int32_t* counters;  // [0] tiles taken, [1] CTAs done
  int32_t num_qo_heads, group;
  float scale;  // sm_scale * log2(e)
  bool early;   // PrefillArgs::early
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// All 32 lanes: lane 2 i + j looks up page j of candidate base + i. A page that is absent or that no row sees starts
// past the end of the pool, where loads give zeros. `known`: what the lane knows of the table already, the physical
// page of logical page `known_page` (-1: nothing).
__device__ inline int32_t LookUp(const TileView& view, const int32_t* table, int32_t absent_row, int base,
                                 int32_t known_page, int32_t known, unsigned* seen_mask) {
  const int lane = threadIdx.x % 32;
  const int candidate = base + lane / 2;
  int32_t row = absent_row;
  bool seen = false;
  if (candidate < view.num_candidates) {
    const int32_t page = 2 * view.Candidate(candidate) + (lane & 1);
    seen = view.Sees(page);
    if (seen) {
      const int32_t physical = page == known_page ? known : table[page];
      if (physical >= 0) row = physical * kPoolRowsPerPage;
    }
  }
  *seen_mask = __ballot_sync(0xffffffffu, seen);
  return row;
}

// Finds the tiles of a block. One warp.
class Planner {
 public:
  // Reads what the first tile will need, and waits for nothing.
  __device__ explicit Planner(const Params& p) : p_(p), rows_(p.rows, p.batch.num_sequences) {
    const int lane = threadIdx.x % 32;
    if (lane < p.batch.num_sequences) {
      kv_len_ = p.batch.kv_len[lane];
      table_offset_ = p.batch.table_offset[lane];
    }
  }

  // False: no tile has number t.
  __device__ bool Find(int32_t t, Plan* plan) const {
    Tile tile;
    if (!rows_.FindTile(p_.schedule, p_.group, t, &tile)) return false;
    const int lane = threadIdx.x % 32;
    const int32_t kv_len = SequenceRows::Of(tile.sequence, p_.batch.kv_len, kv_len_);
    const int32_t* const table = p_.batch.page_tables +
                                 SequenceRows::Of(tile.sequence, p_.batch.table_offset, table_offset_) +
                                 tile.kv_head * p_.batch.head_stride;
    // Without a band the first candidates are the first pages: these are read together with the positions.
    const bool in_table = lane * kPageTokens < kv_len;
    const int32_t known = in_table ? table[lane] : -1;
    const int32_t* const positions = p_.positions + tile.row;
    const TileView view(BandOf(p_.rules.head[tile.kv_head]), positions, tile.num_rows, positions[0],
                        positions[tile.num_rows - 1], 2);
    unsigned seen;
    plan->pool_row[lane] =
        LookUp(view, table, p_.batch.pool.num_pages * kPoolRowsPerPage, 0, in_table ? lane : -1, known, &seen);
    if (lane == 0) {
      plan->work = Work{tile.row, tile.num_rows, tile.qo_head, kv_len, view.low, view.high, view.band};
      plan->table = table;
      plan->seen = seen;
    }
    return true;
  }

 private:
  const Params& p_;
  const SequenceRows rows_;
  int32_t kv_len_ = 0;  // of the lane's sequence, as is the next
  int64_t table_offset_ = 0;
};

template <int kHeadDim>
__device__ void PlanTiles(Smem<kHeadDim>& smem, const Params& p, const Planner& planner) {
  const int lane = threadIdx.x % 32;
  int32_t t = blockIdx.x;
  bool first = true;
  for (uint32_t phase = 0;; phase ^= 1, first = false) {
    // A tile is taken no earlier than this: what one CTA has taken no other can run.
    MbarrierWait(SmemAddress(&smem.plan_empty), phase ^ 1);
    if (!first) {
      WaitForPrevious();  // it counts tiles in the same place
      if (lane == 0) t = gridDim.x + atomicAdd(&p.counters[0], 1);
      t = __shfl_sync(0xffffffffu, t, 0);
    }
    if (!planner.Find(t, &smem.plan)) break;
    MbarrierArrive(SmemAddress(&smem.plan_full));
  }
  if (lane == 0) smem.plan.work.num_rows = -1;
  MbarrierArrive(SmemAddress(&smem.plan_full));
  WaitForPrevious();
  if (lane == 0) {
    // The last CTA leaves the counters at zero for the next launch.
    if (atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1) p.counters[0] = 0;
  }
}

template <int kHeadDim>
__device__ void LoadTiles(Smem<kHeadDim>& smem, const Params& p, const CUtensorMap& q_map, const CUtensorMap& k_map,
                          const CUtensorMap& v_map) {
  constexpr int kStageBytes = kTileKeys * kHeadDim * 2;
  const int lane = threadIdx.x % 32;
  const int32_t absent_row = p.batch.pool.num_pages * kPoolRowsPerPage;
  Ring<1> q_ring;
  Ring<2> work_ring;
  Ring<kStages> k_ring, v_ring;

  const auto load_v = [&](int32_t row0, int32_t row1) {
    if (lane == 0) {
      const uint32_t full = SmemAddress(&smem.v_full[v_ring.stage]);
      MbarrierWait(SmemAddress(&smem.v_empty[v_ring.stage]), v_ring.phase ^ 1);
      MbarrierArriveExpect(full, kStageBytes);
      TmaLoad3(SmemAddress(smem.v[v_ring.stage][0]), &v_map, full, 0, row0 + kPageTokens, 0);
      TmaLoad3(SmemAddress(smem.v[v_ring.stage][1]), &v_map, full, 0, row1 + kPageTokens, 0);
    }
    v_ring.Advance();
  };

  for (uint32_t plan_phase = 0;; plan_phase ^= 1) {
    MbarrierWait(SmemAddress(&smem.plan_full), plan_phase);
    const Work work = smem.plan.work;
    const int32_t* table = smem.plan.table;
    unsigned seen = smem.plan.seen;
    int32_t row = smem.plan.pool_row[lane];
    MbarrierArrive(SmemAddress(&smem.plan_empty));
    if (lane == 0) {
      const uint32_t full = SmemAddress(&smem.q_full);
      MbarrierWait(SmemAddress(&smem.q_empty), q_ring.phase ^ 1);
      smem.work[work_ring.stage] = work;
      if (work.num_rows < 0) {
        MbarrierArrive(full);
      } else {
        MbarrierArriveExpect(full, kTileRows * kHeadDim * 2);
        TmaLoad3(SmemAddress(smem.q), &q_map, full, 0, work.row, work.qo_head * (kHeadDim / 64));
      }
    }
    if (work.num_rows < 0) return;
    q_ring.Advance();
    work_ring.Advance();

    const TileView view(work.band, p.positions + work.row, work.num_rows, work.low, work.high, 2);
    int32_t pending0 = -1, pending1 = 0;  // the pages whose V goes after the next K
    for (int base = 0; base < view.num_candidates; base += kLookUps) {
      if (base > 0) row = LookUp(view, table, absent_row, base, -1, -1, &seen);
      const int count = min(kLookUps, view.num_candidates - base);
      for (int i = 0; i < count; ++i) {
        const int32_t row0 = __shfl_sync(0xffffffffu, row, 2 * i);
        const int32_t row1 = __shfl_sync(0xffffffffu, row, 2 * i + 1);
        if (((seen >> (2 * i)) & 3) == 0) continue;
        if (lane == 0) {
          const int stage = k_ring.stage;
          const uint32_t full = SmemAddress(&smem.k_full[stage]);
          MbarrierWait(SmemAddress(&smem.k_empty[stage]), k_ring.phase ^ 1);
          const int32_t tile = view.Candidate(base + i);
          const bool absent0 = row0 == absent_row, absent1 = row1 == absent_row;
          const bool needs_mask = absent0 || absent1 || !view.AllSee(tile * kTileKeys, (tile + 1) * kTileKeys);
          smem.k_tile[stage] = tile << kTileShift | (absent1 ? kSecondAbsent : 0) | (absent0 ? kFirstAbsent : 0) |
                               (needs_mask ? kNeedsMask : 0) | (base + i == view.num_candidates - 1 ? kLast : 0);
          MbarrierArriveExpect(full, kStageBytes);
#pragma unroll
          for (int block = 0; block < kHeadDim / 64; ++block) {
            TmaLoad3(SmemAddress(smem.k[stage][block]), &k_map, full, 0, row0, block);
            TmaLoad3(SmemAddress(smem.k[stage][block][kPageTokens]), &k_map, full, 0, row1, block);
          }
        }
        k_ring.Advance();
        if (pending0 >= 0) load_v(pending0, pending1);
        pending0 = row0;
        pending1 = row1;
      }
    }
    load_v(pending0, pending1);
  }
}

// One warpgroup's view of its 64 x 128 score tile: thread (warp w, lane 4 g + c) holds rows 16 w + g and 16 w + g + 8,
// columns 8 i + 2 c and 8 i + 2 c + 1 of every 8-column block i; bit n of a mask is the n-th of a row's 32 columns.

// The bits of the columns at or below `column`, counted from the thread's first.
__device__ inline uint32_t BitsUpTo(int32_t column) {
  const int count = column < 0 ? 0 : column / 8 * 2 + min(column % 8 + 1, 2);
  return count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

__device__ inline void MaskScores(float (&s)[64], int32_t k_tile, Band band, int32_t position0, int32_t position1) {
  const int32_t first = (k_tile >> kTileShift) * kTileKeys + 2 * (threadIdx.x % 4);
  const uint32_t present = (k_tile & kFirstAbsent ? 0 : 0x0000ffffu) | (k_tile & kSecondAbsent ? 0 : 0xffff0000u);
  const uint32_t sinks = BitsUpTo(band.sinks - 1 - first);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t high = (r == 0 ? position0 : position1) - first;
    const uint32_t visible = present & BitsUpTo(high) & (sinks | ~BitsUpTo(high - band.window));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((visible >> (2 * i) & 1) == 0) s[4 * i + 2 * r] = -INFINITY;
      if ((visible >> (2 * i + 1) & 1) == 0) s[4 * i + 2 * r + 1] = -INFINITY;
    }
  }
}

// The keys of a tile: whole 128-key tiles under a band.
class BandKeys {
 public:
  __device__ BandKeys(const Work& work, int group) : work_(work), group_(group) {}
  __device__ ConsumerTile tile() const {
    return {work_.row, group_ * kConsumerRows, work_.num_rows, work_.qo_head, work_.kv_len};
  }
  template <int kHeadDim>
  static __device__ uint32_t QAddress(const Smem<kHeadDim>& smem, int group, int block) {
    return SmemAddress(smem.q) + (block * kTileRows + group * kConsumerRows) * 128;
  }
  // Lane 0 reads for its warp: it is also the one that gives the stage back.
  template <int kHeadDim>
  __device__ void Read(const Smem<kHeadDim>& smem, int stage) {
    k_tile_ = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? smem.k_tile[stage] : 0, 0);
  }
  __device__ bool last() const { return k_tile_ & kLast; }
  template <int kHeadDim>
  __device__ void Mask(float (&s)[64], const Smem<kHeadDim>&, int, int32_t position0, int32_t position1) {
    if (k_tile_ & kNeedsMask) MaskScores(s, k_tile_, work_.band, position0, position1);
    begin_[0] = (k_tile_ >> kTileShift) * kTileKeys;
    begin_[1] = begin_[0] + kPageTokens;
  }
  __device__ const int32_t (&begin() const)[2] { return begin_; }

 private:
  const Work& work_;
  const int group_;
  int32_t k_tile_ = 0;
  int32_t begin_[2] = {0, 0};
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    WgmmaKernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  LetNextStart();
  extern __shared__ char raw[];
  auto& smem = *reinterpret_cast<Smem<kHeadDim>*>(raw + (1024 - SmemAddress(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    MbarrierInit(SmemAddress(&smem.plan_full), 32);
    MbarrierInit(SmemAddress(&smem.plan_empty), 32);
    smem.InitBarriers(1);
    MbarrierInitFence();
    PrefetchTensorMap(&q_map);
    PrefetchTensorMap(&k_map);
    PrefetchTensorMap(&v_map);
  }
  if (!p.early) WaitForPrevious();
  if (threadIdx.x < 128) {
    const Planner planner(p);  // its reads travel while the barriers are made
    __syncthreads();
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x < 32) {
      WaitForPrevious();  // q, and the newest keys and values; what consumers write comes behind them
      LoadTiles(smem, p, q_map, k_map, v_map);
    } else if (threadIdx.x < 64) {
      PlanTiles(smem, p, planner);
    }
  } else {
    __syncthreads();
    SetMaxRegistersUp<kConsumerRegisters>();
    Consume<kHeadDim, BandKeys>(smem, p);
  }
#endif
}

template <int kHeadDim>
cudaError_t Launch(const PrefillArgs& a, const Params& params, int num_sms, cudaStream_t stream) {
  constexpr uint32_t kBlocks = kHeadDim / 64;
  CUtensorMap q_map, k_map, v_map;
  const uint64_t pool_rows = uint64_t{2 * kPageTokens} * a.batch.pool.num_pages;
  if (!EncodeBlocks(&q_map, a.q, a.num_rows, 2 * a.q_row_stride, a.heads.num_qo_heads * kBlocks, kTileRows, kBlocks) ||
      !EncodeBlocks(&k_map, a.batch.pool.base, pool_rows, 2 * kHeadDim, kBlocks, kPageTokens, 1) ||
      !EncodeBlocks(&v_map, a.batch.pool.base, pool_rows, 2 * kHeadDim, kBlocks, kPageTokens, kBlocks)) {
    return cudaErrorNotSupported;
  }
  constexpr int kSmemBytes = sizeof(Smem<kHeadDim>) + 1024;
  cudaError_t e = cudaFuncSetAttribute(WgmmaKernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (e != cudaSuccess) return e;
  const int32_t tiles = MaxTiles(a);
  if (tiles == 0) return cudaErrorNotSupported;
  const int grid = std::min(num_sms, tiles);
  return LaunchEarly(WgmmaKernel<kHeadDim>, dim3(grid), dim3(kThreads), kSmemBytes, stream, params, q_map, k_map,
                     v_map);
}

}  // namespace

cudaError_t PrefillSm90(const PrefillArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0;
  if (cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  if (capability != 90 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out) ||
      reinterpret_cast<uintptr_t>(a.batch.pool.base) % 128 != 0 || a.batch.pool.num_pages >= (1 << 24)) {
    return cudaErrorNotSupported;
  }
  Params p{};
  p.schedule = MakeSchedule(a);
  p.rules = a.rules;
  p.batch = a.batch;
  p.rows = {a.row_begin, a.last_rows};
  p.positions = a.positions;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.counters = static_cast<int32_t*>(a.workspace);
  p.num_qo_heads = a.heads.num_qo_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  return a.heads.head_dim == 64 ? Launch<64>(a, p, num_sms, stream) : Launch<128>(a, p, num_sms, stream);
}

}  // namespace spl::kernels::cuda
