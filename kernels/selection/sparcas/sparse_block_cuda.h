// Arguments, shared memory and packing of sparse_attention_cuda.cu: what a block of a stream's cluster begins with.
#pragma once

#include <type_traits>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/selection/sparcas/attend_rows_cuda.h"
#include "kernels/selection/sparcas/compact_gather_cuda.h"
#include "kernels/selection/sparcas/packed_keys_cuda.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

using select_tokens::Part;

inline constexpr int kTile = kPageTokens;
inline constexpr int kUnits = 128;  // at most, of a stream: one for each warp of a cluster
inline constexpr int kMaxSparseGroup = 8;
inline constexpr float kLowest = -1e30f;     // below every score
inline constexpr float kLargest = 0x1p100f;  // a sum of exponentials before it counts from a larger score

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const unsigned short* q;
  int64_t q_row_stride;
  __nv_bfloat16* out;
  float* lse;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  float* weights;
  int64_t weights_stride;
  int64_t dims_offset;
  int32_t num_kv_heads, group, head_dim, num_dims;
  int32_t block_tiles;    // the most of a block
  int32_t block_entries;  // the most that are dealt to a block
  int32_t stages;         // stages of a warp's ring
  float scale;            // sm_scale · log2(e)
  bool early;
};

template <int kBlocks, int kThreads, int kHeads, int kDim>
struct alignas(16) Smem {
  typename TokenChoice<kBlocks, kThreads>::Smem choice;
  float2 heads[kMaxSparseGroup];                       // per head: maximum of the scores, 1 / sum of exponentials
  alignas(16) float2 units[kMaxSparseGroup * kUnits];  // [group, kUnits], of all blocks
  int32_t dims[select_tokens::kMaxDim];                // those of this step; see ChooseDims for the rest
  int32_t changed[select_tokens::kMaxDim];
  float size[select_tokens::kMaxDim];
  uint32_t chosen[8], fresh[8], moved[8];
  int num_changed;
  uint32_t num_listed;
  alignas(16) listed_rows::TheirResults<kBlocks, kHeads, kDim> theirs;
};

// Pages: listed_rows::WidePages or CodePages.
template <typename Pages>
__device__ __forceinline__ std::byte* PackedTile(const Params& p, const int32_t* pages, int32_t tile) {
  constexpr int64_t kPageBytes = 2 * Pages::kHalfBytes;
  constexpr uint32_t kTilesPerPage = PackedKeys{kPageBytes}.tiles_per_page();
  const uint32_t page = static_cast<uint32_t>(tile) / kTilesPerPage;
  return p.batch.pool.base + pages[page] * kPageBytes + (tile - page * kTilesPerPage) * kPackedTileBytes;
}

// The packing of a block's tiles in a step.
struct PackStep {
  const __nv_bfloat16* q;  // queries of its group
  const int32_t* table;
  const std::byte* const* host_pages;  // HotStream::host_pages; null: all pages are in the table
  const int32_t* pages;                // pages of its packed keys
  const int32_t* dims_before;
  int32_t* dims_after;  // null: another block writes it
  bool refresh;
  int32_t from, to;  // tiles
};

// Sets s.dims. Called by all threads. Kept apart from the code of every step, so that it does not cost that code
// registers.
template <int kThreads, typename Pages, typename SmemT>
__device__ __noinline__ void Pack(const Params& p, SmemT& s, const PackStep& x) {
  if (x.refresh) {
    select_tokens::ChooseDims<kThreads>(s, p, x.q, x.dims_before, true);
    if (x.dims_after != nullptr && threadIdx.x < kPackedDims) x.dims_after[threadIdx.x] = s.dims[threadIdx.x];
  } else {
    if (threadIdx.x < kPackedDims) s.dims[threadIdx.x] = x.dims_before[threadIdx.x];
    __syncthreads();
  }
  const int dim = s.dims[threadIdx.x % 32];
  using Keys = std::conditional_t<Pages::kRowBytes == Pages::kDim, packed_keys::CodeKeys, packed_keys::WideKeys>;
  using Element = std::remove_pointer_t<decltype(Keys::keys)>;
  for (int32_t tile = x.from + static_cast<int32_t>(threadIdx.x) / 32; tile < x.to; tile += kThreads / 32) {
    const std::byte* half = x.host_pages == nullptr ? nullptr : x.host_pages[tile];
    if (half == nullptr) half = p.batch.pool.base + int64_t{x.table[tile]} * 2 * Pages::kHalfBytes;
    packed_keys::PackTile(Keys{reinterpret_cast<Element*>(half), Pages::kDim}, dim,
                          PackedTile<Pages>(p, x.pages, tile));
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");  // the ring reads them
  __syncthreads();
}

// The scored tiles of a warp: those of unit after unit, kWarps units apart.
template <int kWarps>
struct TileCursor {
  const Part& part;
  int32_t unit, tile, begin, end;  // the unit's tiles are [begin, end)

  __device__ __forceinline__ TileCursor(const Part& of, int warp) : part(of), unit(of.first_unit + warp) {
    Enter();
    tile = begin;
  }
  __device__ __forceinline__ bool valid() const { return unit >= part.first_unit && unit < part.end_unit; }
  __device__ __forceinline__ bool last_of_unit() const { return tile + 1 == end; }
  __device__ __forceinline__ void Advance() {
    if (++tile < end) return;
    unit += kWarps;
    Enter();
    tile = begin;
  }
  __device__ __forceinline__ void Retreat() {
    if (--tile >= begin) return;
    unit -= kWarps;
    Enter();
    tile = end - 1;
  }

 private:
  __device__ __forceinline__ void Enter() {
    begin = unit * part.unit_tiles;
    end = min(begin + part.unit_tiles, part.num_tiles);
  }
};

}  // namespace spl::kernels::cuda::sparse_attention
