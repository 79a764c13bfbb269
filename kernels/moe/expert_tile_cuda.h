// Device code: which places of which expert a block of a grouped product makes. Only the device knows how many places
// an expert has, so the grid holds as many tiles of rows as there can be, and each block looks up its own.
#pragma once

#include <cstdint>

namespace spl::kernels::cuda {

struct ExpertTile {
  int expert, begin, end;  // places
};

// Tile `row_tile` of all experts' tiles of kTileRows places; expert -1 if there are fewer. For a whole block of
// kThreads, which is synchronised.
template <int kTileRows, int kThreads>
__device__ ExpertTile FindExpertTile(const int32_t* offsets, int num_experts, int row_tile) {
  static_assert(kThreads % 32 == 0);
  __shared__ ExpertTile found;
  __shared__ int of_warps[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto tiles_of = [&](int e) { return (offsets[e + 1] - offsets[e] + kTileRows - 1) / kTileRows; };
  // Every thread has a stretch of experts. Where its tiles begin is a scan over the threads.
  const int stretch = (num_experts + kThreads - 1) / kThreads;
  const int first = min(thread * stretch, num_experts), last = min(first + stretch, num_experts);
  int tiles = 0;
  for (int e = first; e < last; ++e) tiles += tiles_of(e);
  int end = tiles;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, end, d);
    if (lane >= d) end += before;
  }
  if (lane == 31) of_warps[warp] = end;
  if (thread == 0) found.expert = -1;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += of_warps[w];
  if (row_tile < end && row_tile >= end - tiles) {
    int at = end - tiles, e = first;
    while (row_tile >= at + tiles_of(e)) at += tiles_of(e++);
    const int begin = offsets[e] + (row_tile - at) * kTileRows;
    found = {e, begin, min(begin + kTileRows, offsets[e + 1])};
  }
  __syncthreads();
  return found;
}

// Tiles that there can be: every expert may end in one that is not full.
constexpr int64_t MaxExpertTiles(int64_t num_places, int64_t num_experts, int64_t tile_rows) {
  const int64_t with_rows = num_experts < num_places ? num_experts : num_places;
  const int64_t tiles = num_places / tile_rows + with_rows;
  return tiles < num_places ? tiles : num_places;
}

}  // namespace spl::kernels::cuda
