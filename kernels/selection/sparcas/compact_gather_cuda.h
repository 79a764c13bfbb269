// Steps (a) and (b) of select_tokens.h on a device: the dimensions of compact keys are chosen, and keys gathered in
// them. Code of the steps that choose dimensions or have many keys to gather; others append the last position
// themselves (tile_terms_cuda.h).
#pragma once

#include "kernels/selection/sparcas/select_block_cuda.h"

namespace spl::kernels::cuda::select_tokens {

// Step (a): smem.dims and smem.changed. All threads; q of this KV head's group.
template <int kThreads, typename SmemT, typename ParamsT, typename Q>
__device__ __forceinline__ void ChooseDims(SmemT& s, const ParamsT& p, const Q* q, const int32_t* before, bool first) {
  const int t = threadIdx.x, lane = t % 32;
  float size = 0;
  if (t < p.head_dim) {
    for (int h = 0; h < p.group; ++h) size = __fadd_rn(size, fabsf(ToF(q[h * p.head_dim + t])));
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

// Keys pass through shared memory 16 rows at a time; a row's stride is that of 16-byte chunks, with one more so that
// the rows of a dimension lie in different banks. Chunks of codes have 8 bytes: a row need not be a multiple of 16.
inline constexpr int kGatherRows = 16;
constexpr int kGatherStride(int row_bytes) { return row_bytes + 16; }

// The key of candidate j.
template <typename Kv, bool kListed>
__device__ __forceinline__ KeyRow<Kv> KeyOf(const Params& p, const int32_t* table, const Candidates& own, int32_t j) {
  const int32_t position = PositionOf<kListed>(own, j);
  return {KeysOf<Kv>(p.batch.pool.base, table[position / kTile], p.head_dim), position % kTile, p.head_dim};
}

// Gathers `slots` of candidates [begin, end) of tile `tile`; a warp. Chosen dimensions lie all over a row: a few are
// fetched one by one, for more of them whole rows are read. tile_at: CompactStream::At of the tile. stage: kGatherRows
// rows of this warp.
template <typename Kv, bool kListed>
__device__ __forceinline__ void GatherTile(const Params& p, const int32_t* table, const Candidates& own,
                                           int64_t tile_at, int32_t tile, int32_t begin, int32_t end,
                                           const int32_t* slots, int num_slots, const int32_t* dims, char* stage) {
  constexpr int kFewSlots = 3;
  using Chunk = std::conditional_t<kCodes<Kv>, uint2, uint4>;
  constexpr int kChunk = sizeof(Chunk);
  auto* to = reinterpret_cast<CompactType<Kv>*>(p.batch.pool.base) + tile_at;
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
  const int chunks = row_bytes / kChunk, stride = kGatherStride(row_bytes);
  for (int first = 0; first < kTile; first += kGatherRows) {
    if (first >= end || first + kGatherRows <= begin) continue;
    const char* from = reinterpret_cast<const char*>(p.batch.pool.base);
    int64_t row_at = 0;
    // This lane's row; past the last candidate that again.
    const int32_t at_lane = min(tile * kTile + first + lane % kGatherRows, own.count - 1);
    const KeyRow<Kv> of_lane = KeyOf<Kv, kListed>(p, table, own, at_lane);
    if constexpr (kListed) {
      row_at = reinterpret_cast<const char*>(of_lane.row) - from;  // for the other lanes
    } else {
      from = reinterpret_cast<const char*>(KeyOf<Kv, kListed>(p, table, own, tile * kTile + first).row);
    }
    constexpr int kAtOnce = 8;  // 16 rows of 128 elements of 2 bytes or codes
    for (int base = 0; base < kGatherRows * chunks; base += 32 * kAtOnce) {
      Chunk x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = base + 32 * n + lane;
        if constexpr (kListed) {
          const int64_t row = __shfl_sync(0xffffffffu, row_at, min(at / chunks, kGatherRows - 1));
          if (at < kGatherRows * chunks) x[n] = *reinterpret_cast<const Chunk*>(from + row + at % chunks * kChunk);
        } else {
          if (at < kGatherRows * chunks) x[n] = *reinterpret_cast<const Chunk*>(from + at * kChunk);
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = base + 32 * n + lane;
        if (at < kGatherRows * chunks)
          *reinterpret_cast<Chunk*>(stage + at / chunks * stride + at % chunks * kChunk) = x[n];
      }
    }
    __syncwarp();
    const int row = first + lane % kGatherRows;
    const KeyRow<Kv> staged = of_lane.CopiedTo(stage + lane % kGatherRows * stride);
    for (int i = lane / kGatherRows; i < num_slots; i += 32 / kGatherRows) {
      const int slot = slots == nullptr ? i : slots[i];
      const CompactType<Kv> x = staged[dims[slot]];
      if (row >= begin && row < end) to[slot * kTile + row] = x;
    }
    __syncwarp();
  }
}

// The gathering of a block's compact keys.
template <typename Q>
struct GatherStep {
  const Q* q;  // queries of its group
  const int32_t* table;
  const int32_t* compact;  // pages of its compact keys
  const int32_t* dims_before;
  int32_t* dims_after;
  Candidates own;
  bool refresh, first, writes_dims;
  int32_t gathered, first_tile, end_tile;
};

// Steps (a) and (b), except for a position or a few at the end; sets s.dims. Called by all threads. Kept apart from the
// code of every step, so that it does not cost that code registers. stage: as for GatherTile, one per warp.
template <int kThreads, bool kListed, typename SmemT, typename Q, typename Kv>
__device__ __noinline__ void Gather(const Params& p, SmemT& s, const GatherStep<Q>& x, char* stage) {
  const CompactStream<Kv> compact(p, x.compact);
  const int t = threadIdx.x, warp = t / 32;
  if (x.refresh) {
    ChooseDims<kThreads>(s, p, x.q, x.dims_before, x.first);
    if (x.writes_dims && t < p.num_dims) x.dims_after[t] = s.dims[t];
  } else {
    if (t < p.num_dims) s.dims[t] = x.dims_before[t];
    __syncthreads();
  }
  stage += warp * kGatherRows * kGatherStride(p.head_dim * static_cast<int>(sizeof(Kv)));
  for (int32_t tile = x.first_tile + warp; tile < x.end_tile; tile += kThreads / 32) {
    const int64_t at = compact.At(tile);
    if (x.refresh && tile * kTile < x.gathered)
      GatherTile<Kv, kListed>(p, x.table, x.own, at, tile, 0, x.gathered, s.changed, s.num_changed, s.dims, stage);
    if (tile * kTile + kTile > x.gathered)
      GatherTile<Kv, kListed>(p, x.table, x.own, at, tile, x.gathered, x.own.count, nullptr, p.num_dims, s.dims, stage);
  }
  __syncthreads();
}

}  // namespace spl::kernels::cuda::select_tokens
