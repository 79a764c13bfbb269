// Arguments, shared memory and a block's part of a stream, which the stages of select_tokens_cuda.cu share.
#pragma once

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/selection/sparcas/key_rows_cuda.h"
#include "kernels/selection/sparcas/select_tokens_cuda.h"
#include "kernels/selection/token_choice_cuda.h"

namespace spl::kernels::cuda::select_tokens {

inline constexpr int kTile = kPageTokens;
inline constexpr int kMaxGroup = 64;
inline constexpr int kMaxDim = 256;
inline constexpr int kUnits = 64;  // at most, of a stream

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

// Without kListed every position is a candidate.
template <bool kListed>
__device__ __forceinline__ int32_t PositionOf(const Candidates& own, int32_t j) {
  if constexpr (kListed) return own.Position(j);
  return j;
}

// A block's part of a stream: consecutive tiles, as many whole units of tiles as its rank in the cluster says.
// Positions are those of the stream's candidates.
struct Part {
  int32_t kv_len, num_tiles, unit_tiles, num_units;
  int32_t first_unit, end_unit, first_tile, end_tile;
  int32_t begin, end;  // positions

  __device__ __forceinline__ Part(int32_t length, int rank, int num_blocks, int most_units = kUnits) {
    kv_len = length;
    num_tiles = (kv_len + kTile - 1) / kTile;
    unit_tiles = max((num_tiles + most_units - 1) / most_units, 1);
    num_units = (num_tiles + unit_tiles - 1) / unit_tiles;
    first_unit = rank * num_units / num_blocks;
    end_unit = (rank + 1) * num_units / num_blocks;
    first_tile = first_unit * unit_tiles;
    end_tile = min(end_unit * unit_tiles, num_tiles);
    begin = first_tile * kTile;
    end = min(end_tile * kTile, kv_len);
  }
};

// Where a stream's compact keys are, in a pool of Kv (compact_keys.h, key_rows_cuda.h).
template <typename Kv>
struct CompactStream {
  const int32_t* pages;
  int32_t tiles_per_page;
  int64_t page_elements;  // elements of CompactType<Kv>, as below
  int32_t tile_elements;

  __device__ __forceinline__ CompactStream(const Params& p, const int32_t* compact)
      : pages(compact),
        tiles_per_page((kCodes<Kv> ? 1 : 2) * p.head_dim / p.num_dims),
        page_elements(PageElements<Kv>(p.head_dim) / (kCodes<Kv> ? 2 : 1)),
        tile_elements(p.num_dims * kTile) {}
  // Place of a tile, in elements from the pool's first.
  __device__ __forceinline__ int64_t At(int32_t tile) const {
    return pages[tile / tiles_per_page] * page_elements + int64_t{tile % tiles_per_page} * tile_elements;
  }
};

// Where the n-th 8 positions of a tile are among the terms of a query head: the lanes of an mma that hold 4 heads write
// to different banks.
template <int kHeads>
__device__ __forceinline__ int TermSwizzle(int head) {
  return kHeads == 4 ? (head & 2) * 8 : 0;
}

}  // namespace spl::kernels::cuda::select_tokens
