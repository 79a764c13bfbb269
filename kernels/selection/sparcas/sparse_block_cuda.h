// Arguments, shared memory and packing of sparse_attention_cuda.cu: what a block of a stream's cluster begins with.
#pragma once

#include <type_traits>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/selection/run_choice_cuda.h"
#include "kernels/selection/sparcas/attend_rows_cuda.h"
#include "kernels/selection/sparcas/compact_gather_cuda.h"
#include "kernels/selection/sparcas/packed_keys_cuda.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"
#include "kernels/selection/sparcas/staged_rows_cuda.h"

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
  float* kept_mass;
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
  typename RunChoice<kBlocks, kThreads>::Smem choice;
  typename RunChoice<kBlocks, kThreads>::Chosen picked;
  float2 heads[kMaxSparseGroup];  // per head: maximum of the scores, 1 / sum of exponentials
  union {
    alignas(16) float2 units[kMaxSparseGroup * kUnits];  // [group, kUnits], of all blocks
    float left_out[PackedSample::kMost][kHeads];         // behind the sums, in block 0: shares of the sample's tiles
  };
  int32_t dims[select_tokens::kMaxDim];  // those of this step; see ChooseDims for the rest
  int32_t changed[select_tokens::kMaxDim];
  union {
    float size[select_tokens::kMaxDim];
    alignas(16) float queries[kMaxSparseGroup * kPackedDims];  // [heads, 32], once the dimensions are known
  };
  uint32_t chosen[8], fresh[8], moved[8];
  int num_changed;
  alignas(16) listed_rows::TheirResults<kBlocks, kHeads, kDim> theirs;
};

// Pages: listed_rows::WidePages or CodePages.
template <typename Pages>
inline constexpr bool kCodes = Pages::kRowBytes == Pages::kDim;

// A block's results: rows of codes go straight to registers.
template <int kBlocks, int kHeads, typename Pages>
using ResultsOf = std::conditional_t<kCodes<Pages>, listed_rows::Results<kBlocks, kHeads, Pages::kDim>,
                                     listed_rows::StagedResults<kBlocks, kHeads, Pages::kDim>>;

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
  using Keys = std::conditional_t<kCodes<Pages>, packed_keys::CodeKeys, packed_keys::WideKeys>;
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
  __device__ __forceinline__ bool first_of_unit() const { return tile == begin; }
  __device__ __forceinline__ bool last_of_unit() const { return tile + 1 == end; }
  __device__ __forceinline__ int32_t next_tile() const {
    return last_of_unit() ? (unit + kWarps) * part.unit_tiles : tile + 1;
  }
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

// Where the packed keys of a warp's tiles are, counted as TileCursor meets them: lane i knows it of tiles i, i + 32,
// .., 32 tiles at a time, so that no lookup stands between two of them.
template <int kWarps, typename Pages>
class TilePlaces {
 public:
  __device__ __forceinline__ TilePlaces(const Params& p, const int32_t* pages, const Part& part, int warp)
      : p_(p), pages_(pages), first_unit_(part.first_unit + warp), unit_tiles_(part.unit_tiles) {
    const int32_t units = (part.end_unit - first_unit_ + kWarps - 1) / kWarps;
    if (units <= 0) return;
    const int32_t last = (first_unit_ + kWarps * (units - 1)) * unit_tiles_;
    num_ = (units - 1) * unit_tiles_ + min(unit_tiles_, part.num_tiles - last);
  }
  __device__ __forceinline__ int32_t num() const { return num_; }
  // The place of the n-th tile in lane n % 32; anything in others. All lanes.
  __device__ __forceinline__ const std::byte* Of(int32_t n) {
    if (static_cast<uint32_t>(n ^ of_) >= 32) Find(n & ~31);
    return mine_;
  }
  // Bytes that are copied from there: those of a pair, if the n-th tile is its first and the other follows it.
  __device__ __forceinline__ int bytes() const { return bytes_; }

 private:
  __device__ __forceinline__ void Find(int32_t from) {
    of_ = from;
    const int32_t n = min(from + static_cast<int32_t>(threadIdx.x) % 32, num_ - 1), before = n / unit_tiles_;
    mine_ = PackedTile<Pages>(p_, pages_, (first_unit_ + kWarps * before) * unit_tiles_ + (n - before * unit_tiles_));
    // Two pages are never as far from each other as two neighbours in one.
    const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(mine_));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool first = lane % 2 == 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, low, 1);
    const bool follows = (first ? other - low : low - other) == kPackedTileBytes;
    bytes_ = !follows ? kPackedTileBytes : !first ? 0 : 2 * kPackedTileBytes;
    if (from + lane + 1 >= num_) bytes_ = min(bytes_, kPackedTileBytes);
  }

  const Params& p_;
  const int32_t* const pages_;
  const int32_t first_unit_, unit_tiles_;
  int32_t num_ = 0, of_ = -32;
  int bytes_ = 0;
  const std::byte* mine_ = nullptr;
};

}  // namespace spl::kernels::cuda::sparse_attention
