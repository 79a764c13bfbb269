// Prefill attention over lines for Hopper: the consumers of prefill_consumer_sm90.h over another walk of the keys.
//
// The rows of a tile must see the same pages, and lines are per 64 rows: a CTA's two warpgroups therefore take the same
// 64 rows for two query heads of one KV head, which share every K and V stage. A loader warp turns the row tile's bits
// into pages: first the gathered pages of single columns that have a bit, each with its mask of 64 columns, then the
// whole tiles in ascending order, two pages to a stage. The page of the rows themselves is always the last of them:
// only the last stage can hold slots that were never written.
//
// Work is taken from a counter, a section of KV heads whose K and V fit in the L2 cache at a time, late rows first.
#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/prefill_consumer_sm90.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kLineRows = kConsumerRows;
constexpr int kThreads = 128 * (1 + kConsumers);  // a consumer warpgroup is a query head of the work item
// The first position of a page of columns, for the comparison with a row's: all of them lie in front of it.
[[maybe_unused]] constexpr int32_t kBeforeAllRows = -(1 << 24);

struct Work {
  int32_t row;
  int32_t num_rows;    // < 0: no more work
  int32_t qo_head[2];  // of the warpgroups; the second < 0: none
  int32_t kv_len;
};

enum KeyFlags : int32_t { kLast = 1, kNeedsMask = 2 };

// What consumers need to know of a stage beside its keys.
struct alignas(16) KeyStage {
  uint64_t present[2];  // of the columns of each half
  int32_t begin[2];     // position of the half's first column
  int32_t flags;        // KeyFlags
  int32_t unused;
};

// A page on its way to a half of a stage.
struct alignas(16) KeyHalf {
  uint64_t present;
  int32_t begin;
  int32_t row;  // in the pool, or with kColumns in the column pages, as a matrix of rows
};
constexpr int32_t kColumns = 1 << 31;
constexpr int kQueue = 64;  // 32 new ones behind at most two, and the two whose V is still to come

// q: [query head][block][kLineRows][64].
template <int kHeadDim>
struct alignas(1024) Smem : PrefillSmem<kHeadDim, Work> {
  KeyStage key_stage[kStages];
  KeyHalf queue[kQueue];
};

struct Params {
  Schedule schedule;  // of the heads with lines, all of them "full"
  PagedBatch batch;
  RowRanges rows;
  PrefillLines lines;
  const int32_t* positions;
  __nv_bfloat16* out;
  float* lse;
  int32_t* counters;  // [0] items taken, [1] CTAs done
  int32_t num_qo_heads, group;
  float scale;  // sm_scale * log2(e)
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The position of the n-th set bit of a word that has more than n.
__device__ inline int NthBit(uint32_t word, int n) {
  int at = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const int below = __popc(word & ((1u << width) - 1));
    if (n >= below) {
      n -= below;
      word >>= width;
      at += width;
    }
  }
  return at;
}

struct Item {
  int32_t row, num_rows, row_tile, kv_head, qo_head[2];
};

// Item t: sections of heads, within a section late row tiles first, within a row tile all pairs of query heads.
__device__ inline bool FindItem(const Params& p, int32_t t, Item* item) {
  const int begin = p.rows.begin(0), end = p.rows.end(0), first = p.rows.row_begin[0];
  // Row tiles are counted from the sequence's first row, also where only its last rows are computed.
  const int first_tile = (begin - first) / kLineRows,
            num_tiles = (end - first + kLineRows - 1) / kLineRows - first_tile;
  const int pairs = (p.group + 1) / 2;
  if (num_tiles <= 0 || t >= num_tiles * p.schedule.num_heads * pairs) return false;
  const int per_section = num_tiles * p.schedule.section * pairs;
  const int section = t / per_section;
  t -= section * per_section;
  const int first_head = section * p.schedule.section;
  const int heads = min(p.schedule.section, p.schedule.num_heads - first_head);
  const int tile = first_tile + num_tiles - 1 - t / (heads * pairs), which = t % (heads * pairs);
  item->kv_head = p.schedule.kv_head[first_head + which / pairs];
  item->row_tile = tile;
  item->row = max(first + tile * kLineRows, begin);
  item->num_rows = min(first + (tile + 1) * kLineRows, end) - item->row;
  const int head = which % pairs * 2;
  item->qo_head[0] = item->kv_head * p.group + head;
  item->qo_head[1] = head + 1 < p.group ? item->qo_head[0] + 1 : -1;
  return true;
}

struct Maps {
  const CUtensorMap *q, *k, *v, *column_k, *column_v;
};

template <int kHeadDim>
class Loader {
 public:
  __device__ Loader(Smem<kHeadDim>& smem, const Params& p, const Maps& maps) : smem_(smem), p_(p), maps_(maps) {}

  __device__ void Run() {
    const int lane = threadIdx.x % 32;
    int32_t t = blockIdx.x;
    for (;;) {
      Item item;
      const bool any = FindItem(p_, t, &item);
      // Taken now, needed when this item's pages are on their way.
      int32_t following = 0;
      if (any && lane == 0) following = gridDim.x + atomicAdd(&p_.counters[0], 1);
      if (lane == 0) {
        const uint32_t full = SmemAddress(&smem_.q_full);
        MbarrierWait(SmemAddress(&smem_.q_empty), q_ring_.phase ^ 1);
        Work& work = smem_.work[work_ring_.stage];
        if (!any) {
          work.num_rows = -1;
          MbarrierArrive(full);
        } else {
          work = Work{item.row, item.num_rows, {item.qo_head[0], item.qo_head[1]}, p_.batch.kv_len[0]};
          constexpr int kBlocks = kHeadDim / 64;
          const int heads = item.qo_head[1] < 0 ? 1 : 2;
          MbarrierArriveExpect(full, heads * kLineRows * kHeadDim * 2);
          for (int i = 0; i < heads; ++i)
            TmaLoad3(SmemAddress(&smem_.q[i * kLineRows * kHeadDim]), maps_.q, full, 0, item.row,
                     item.qo_head[i] * kBlocks);
        }
      }
      if (!any) break;
      q_ring_.Advance();
      work_ring_.Advance();
      WalkPages(item);
      t = __shfl_sync(0xffffffffu, following, 0);
    }
    if (lane == 0) {
      // The last CTA leaves the counters at zero for the next launch.
      if (atomicInc(reinterpret_cast<unsigned*>(&p_.counters[1]), gridDim.x - 1) == gridDim.x - 1) p_.counters[0] = 0;
    }
  }

 private:
  static constexpr int kStageBytes = kTileKeys * kHeadDim * 2;
  static constexpr int kAbsent = -1;

  __device__ void WalkPages(const Item& item) {
    const int lane = threadIdx.x % 32;
    low_ = p_.positions[item.row];
    sent_ = queued_ = 0;
    const int64_t line = int64_t{item.kv_head} * p_.lines.row_tiles + item.row_tile;

    const uint64_t* masks = p_.lines.column_masks + line * p_.lines.column_words;
    for (int base = 0; base < p_.lines.column_words; base += 32) {
      const uint64_t mask = base + lane < p_.lines.column_words ? masks[base + lane] : 0;
      const int page = item.kv_head * p_.lines.column_words + base + lane;
      Queue(mask != 0, {mask, kBeforeAllRows, page * kPoolRowsPerPage | kColumns});
    }

    const auto* words = reinterpret_cast<const uint32_t*>(p_.lines.tiles + line * p_.lines.tile_words);
    const int32_t* table = p_.batch.page_tables + p_.batch.table_offset[0] + item.kv_head * p_.batch.head_stride;
    const int num_words = 2 * p_.lines.tile_words;
    for (int group = 0; group < num_words; group += 32) {
      const uint32_t word = group + lane < num_words ? words[group + lane] : 0;
      int through = __popc(word);  // set bits of this and the lanes below
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, through, d);
        if (lane >= d) through += below;
      }
      const int total = __shfl_sync(0xffffffffu, through, 31);
      for (int base = 0; base < total; base += 32) {
        // Lane i finds the page of set bit base + i: the first lane whose count is past it has the word.
        const int rank = base + lane;
        int owner = 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          if (__shfl_sync(0xffffffffu, through, owner + step - 1) <= rank) owner += step;
        }
        const uint32_t owned = __shfl_sync(0xffffffffu, word, owner);
        const int before = __shfl_sync(0xffffffffu, through, owner) - __popc(owned);
        int32_t page = 0, physical = kAbsent;
        if (rank < total) {
          page = (group + owner) * 32 + NthBit(owned, rank - before);
          physical = table[page];
        }
        Queue(physical >= 0, {~uint64_t{0}, page * kPageTokens, physical * kPoolRowsPerPage});
      }
    }
    while (sent_ < max(queued_, 1)) Send(sent_ + 2 >= queued_);
    LoadV(sent_ - 2);
  }

  // All lanes, ascending: appends the halves of the lanes that have one, then sends all stages but the last one known.
  __device__ void Queue(bool has, const KeyHalf& half) {
    const unsigned all = __ballot_sync(0xffffffffu, has);
    if (has) smem_.queue[(queued_ + __popc(all & ((1u << (threadIdx.x % 32)) - 1))) % kQueue] = half;
    queued_ += __popc(all);
    __syncwarp();
    while (queued_ - sent_ > 2) Send(false);
    __syncwarp();
  }

  // K of the stage of halves sent_ and sent_ + 1, V of the stage before it.
  __device__ void Send(bool last) {
    if (threadIdx.x % 32 == 0) {
      const int stage = k_ring_.stage;
      const uint32_t full = SmemAddress(&smem_.k_full[stage]);
      MbarrierWait(SmemAddress(&smem_.k_empty[stage]), k_ring_.phase ^ 1);
      KeyStage& keys = smem_.key_stage[stage];
      bool mask = false;
      MbarrierArriveExpect(full, kStageBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const KeyHalf half = Half(sent_ + i);
        keys.present[i] = half.present;
        keys.begin[i] = half.begin;
        mask |= half.present != ~uint64_t{0} || half.begin + kPageTokens > low_ + 1;
        const void* map = half.row & kColumns ? maps_.column_k : maps_.k;
#pragma unroll
        for (int block = 0; block < kHeadDim / 64; ++block) {
          TmaLoad3(SmemAddress(smem_.k[stage][block][i * kPageTokens]), map, full, 0, half.row & ~kColumns, block);
        }
      }
      keys.flags = (last ? kLast : 0) | (mask ? kNeedsMask : 0);
      MbarrierArrive(full);
    }
    k_ring_.Advance();
    if (sent_ > 0) LoadV(sent_ - 2);
    sent_ += 2;
  }

  __device__ void LoadV(int first) {
    if (threadIdx.x % 32 == 0) {
      const int stage = v_ring_.stage;
      const uint32_t full = SmemAddress(&smem_.v_full[stage]);
      MbarrierWait(SmemAddress(&smem_.v_empty[stage]), v_ring_.phase ^ 1);
      MbarrierArriveExpect(full, kStageBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const KeyHalf half = Half(first + i);
        TmaLoad3(SmemAddress(smem_.v[stage][i]), half.row & kColumns ? maps_.column_v : maps_.v, full, 0,
                 (half.row & ~kColumns) + kPageTokens, 0);
      }
    }
    v_ring_.Advance();
  }

  // Past the last one: none, loaded from past the end of the pool, which gives zeros.
  __device__ KeyHalf Half(int i) const {
    return i < queued_ ? smem_.queue[i % kQueue] : KeyHalf{0, 0, p_.batch.pool.num_pages * kPoolRowsPerPage};
  }

  Smem<kHeadDim>& smem_;
  const Params& p_;
  const Maps& maps_;
  Ring<1> q_ring_;
  Ring<2> work_ring_;
  Ring<kStages> k_ring_, v_ring_;
  int32_t low_ = 0;            // position of the row tile's first row
  int sent_ = 0, queued_ = 0;  // halves of the row tile
};

// See prefill_softmax_sm90.h for who holds what. `keys` is read by all threads.
__device__ inline void MaskScores(float (&s)[64], const KeyStage& keys, int32_t position0, int32_t position1) {
  const int shift = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t position = r == 0 ? position0 : position1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t count = position - keys.begin[half] + 1;
      const uint64_t causal = count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
      const uint64_t visible = (keys.present[half] & causal) >> shift;
      const auto low = static_cast<uint32_t>(visible), high = static_cast<uint32_t>(visible >> 32);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = (i < 4 ? low : high) >> (8 * (i % 4));
        if ((bits & 1) == 0) s[4 * (8 * half + i) + 2 * r] = -INFINITY;
        if ((bits & 2) == 0) s[4 * (8 * half + i) + 2 * r + 1] = -INFINITY;
      }
    }
  }
}

// The keys of a work item: pages of single columns, then whole tiles, each half of a stage with its own mask.
class LineKeys {
 public:
  __device__ LineKeys(const Work& work, int group) : work_(work), qo_head_(work.qo_head[group]) {}
  // A head that is not there has no rows.
  __device__ ConsumerTile tile() const {
    return {work_.row, 0, qo_head_ < 0 ? 0 : work_.num_rows, qo_head_, work_.kv_len};
  }
  template <int kHeadDim>
  static __device__ uint32_t QAddress(const Smem<kHeadDim>& smem, int group, int block) {
    return SmemAddress(smem.q) + (group * (kHeadDim / 64) + block) * kLineRows * 128;
  }
  template <int kHeadDim>
  __device__ void Read(const Smem<kHeadDim>& smem, int stage) {
    flags_ = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? smem.key_stage[stage].flags : 0, 0);
  }
  __device__ bool last() const { return flags_ & kLast; }
  template <int kHeadDim>
  __device__ void Mask(float (&s)[64], const Smem<kHeadDim>& smem, int stage, int32_t position0, int32_t position1) {
    if (flags_ & kNeedsMask) MaskScores(s, smem.key_stage[stage], position0, position1);
    if (!last()) return;
    begin_[0] = smem.key_stage[stage].begin[0];
    begin_[1] = smem.key_stage[stage].begin[1];
  }
  __device__ const int32_t (&begin() const)[2] { return begin_; }

 private:
  const Work& work_;
  const int32_t qo_head_;
  int32_t flags_ = 0;
  int32_t begin_[2] = {0, 0};
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    LinesKernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ CUtensorMap column_k_map, const __grid_constant__ CUtensorMap column_v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  auto& smem = *reinterpret_cast<Smem<kHeadDim>*>(raw + (1024 - SmemAddress(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    smem.InitBarriers(2);  // the bytes, then what is said of them
    MbarrierInitFence();
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map, &column_k_map, &column_v_map}) PrefetchTensorMap(map);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x < 32) {
      const Maps maps{&q_map, &k_map, &v_map, &column_k_map, &column_v_map};
      Loader<kHeadDim>(smem, p, maps).Run();
    }
  } else {
    SetMaxRegistersUp<kConsumerRegisters>();
    Consume<kHeadDim, LineKeys>(smem, p);
  }
#endif
}

template <int kHeadDim>
cudaError_t Launch(const PrefillArgs& a, const Params& params, int num_sms, cudaStream_t stream) {
  constexpr uint32_t kBlocks = kHeadDim / 64;
  const auto pages = [](CUtensorMap* map, const void* base, uint64_t count, uint32_t blocks) {
    return EncodeBlocks(map, base, uint64_t{2 * kPageTokens} * count, 2 * kHeadDim, kBlocks, kPageTokens, blocks);
  };
  CUtensorMap q_map, k_map, v_map, column_k_map, column_v_map;
  const bool columns = a.lines.column_words > 0;
  const uint64_t column_pages = static_cast<uint64_t>(a.heads.num_kv_heads) * a.lines.column_words;
  const void* column_base = columns ? a.lines.column_pages : a.batch.pool.base;
  if (!EncodeBlocks(&q_map, a.q, a.num_rows, 2 * a.q_row_stride, a.heads.num_qo_heads * kBlocks, kLineRows, kBlocks) ||
      !pages(&k_map, a.batch.pool.base, a.batch.pool.num_pages, 1) ||
      !pages(&v_map, a.batch.pool.base, a.batch.pool.num_pages, kBlocks) ||
      !pages(&column_k_map, column_base, columns ? column_pages : a.batch.pool.num_pages, 1) ||
      !pages(&column_v_map, column_base, columns ? column_pages : a.batch.pool.num_pages, kBlocks)) {
    return cudaErrorNotSupported;
  }
  constexpr int kSmemBytes = sizeof(Smem<kHeadDim>) + 1024;
  static_assert(kSmemBytes <= 227 * 1024);
  cudaError_t e = cudaFuncSetAttribute(LinesKernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (e != cudaSuccess) return e;
  const int64_t items = int64_t{a.num_rows / kLineRows + 1} * params.schedule.num_heads * ((params.group + 1) / 2);
  if (items >= (1 << 30)) return cudaErrorNotSupported;
  const int grid = static_cast<int>(std::min<int64_t>(num_sms, items));
  LinesKernel<kHeadDim>
      <<<grid, kThreads, kSmemBytes, stream>>>(params, q_map, k_map, v_map, column_k_map, column_v_map);
  return cudaGetLastError();
}

}  // namespace

cudaError_t PrefillLinesSm90(const PrefillArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0;
  if (cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  if (capability != 90 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out) ||
      reinterpret_cast<uintptr_t>(a.batch.pool.base) % 128 != 0 || a.batch.pool.num_pages >= (1 << 24) ||
      reinterpret_cast<uintptr_t>(a.lines.column_pages) % 128 != 0 ||
      int64_t{a.heads.num_kv_heads} * a.lines.column_words >= (1 << 24)) {
    return cudaErrorNotSupported;
  }
  Params p{};
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    if (a.rules.head[h].rule == VisibilityRule::kLines)
      p.schedule.kv_head[p.schedule.num_heads++] = static_cast<uint8_t>(h);
  }
  const int64_t head_bytes = int64_t{4} * a.heads.head_dim * std::max(a.max_kv_len, 1);
  p.schedule.num_full = p.schedule.num_heads;
  p.schedule.section = static_cast<int32_t>(std::clamp<int64_t>(kL2Budget / head_bytes, 1, p.schedule.num_heads));
  p.batch = a.batch;
  p.rows = {a.row_begin, a.last_rows};
  p.lines = a.lines;
  p.positions = a.positions;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.counters = static_cast<int32_t*>(a.workspace);
  p.num_qo_heads = a.heads.num_qo_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.scale = a.heads.sm_scale * kLog2e;
  return a.heads.head_dim == 64 ? Launch<64>(a, p, num_sms, stream) : Launch<128>(a, p, num_sms, stream);
}

}  // namespace spl::kernels::cuda
