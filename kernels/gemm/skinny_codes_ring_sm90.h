// How a block of skinny_codes_gemm_cuda_sm90.cu loads its tiles: codes through a ring of each warp, scales and zero
// points of a tile while the one before is multiplied. Included by .cu files only.
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/skinny_codes_sm90.h"

namespace spl::kernels::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The stages of a warp's codes: its chunks of the block's tiles, in turn.
template <typename Tile, int kWarps>
struct CodeRing {
  static constexpr int kStage = Tile::kFeatures * kRowBytes;
  const Params& p;
  const CUtensorMap& map;
  const uint32_t codes, full;  // addresses
  const int warp, num_tiles;
  int tile, chunk;  // that are loaded next; a warp without a chunk is past the last tile from the start

  __device__ CodeRing(const Params& p, const CUtensorMap& map, char* smem, int num_tiles)
      : p(p),
        map(map),
        codes(SmemAddress(smem) + threadIdx.x / 32 * p.layout.stages * kStage),
        full(SmemAddress(smem + p.layout.barriers) + threadIdx.x / 32 * kMaxStages * 8),
        warp(threadIdx.x / 32),
        num_tiles(num_tiles),
        tile(warp < p.chunks ? static_cast<int>(blockIdx.x) : num_tiles),
        chunk(warp) {}
  // By one lane.
  __device__ void Load(int stage) {
    if (tile >= num_tiles) return;
    MbarrierArriveExpect(full + 8 * stage, kStage);
    const int first = tile * Tile::kOutputs;
    TmaLoad2(codes + stage * kStage, &map, full + 8 * stage, chunk * kRowBytes, first);
    if constexpr (Tile::kGated) {
      TmaLoad2(codes + stage * kStage + kStage / 2, &map, full + 8 * stage, chunk * kRowBytes,
               static_cast<int>(p.outputs) + first);
    }
    chunk += kWarps;
    if (chunk >= p.chunks) {
      chunk = warp;
      tile += gridDim.x;
    }
  }
  __device__ void Begin() {  // by one lane
    for (int i = 0; i < p.layout.stages; ++i) MbarrierInit(full + 8 * i, 1);
    MbarrierInitFence();
    FenceProxyAsync();
    for (int i = 0; i < p.layout.stages; ++i) Load(i);
  }
};

// Scales and zero points of a tile.
struct TileFactors {
  float* scales;
  uint8_t* zeros;
};

// Those of up to kCount features from `first` on.
template <Codes kCodes, int kCount>
__device__ __forceinline__ void CopyFeatureFactors(const Params& p, int64_t first, int64_t end, const TileFactors& to) {
  constexpr int kThreads = 32 * Warps(kCodes);
  const int groups = p.num_groups;
  const int64_t begin = first * groups;
  const auto count = static_cast<int>(min(int64_t{kCount} * groups, end * groups - begin));
  for (int i = threadIdx.x; i < count; i += kThreads)
    CpAsync4(SmemAddress(to.scales + i + i / groups), p.scales + begin + i, 4);
  if constexpr (kCodes == Codes::kInt4) {
    for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads)
      CpAsync4(SmemAddress(to.zeros + i), p.zeros + begin + i, min(4, count - i));
  }
}

// Begins to copy the factors of a tile; all threads of the block call it.
template <Codes kCodes, typename Tile>
__device__ __forceinline__ void CopyFactors(const Params& p, int tile, const TileFactors& to) {
  const int64_t first = static_cast<int64_t>(tile) * Tile::kOutputs;
  CopyFeatureFactors<kCodes, Tile::kOutputs>(p, first, p.outputs, to);
  if constexpr (Tile::kGated) {
    const TileFactors of_up{to.scales + Tile::kOutputs * (p.num_groups + 1), to.zeros + Tile::kOutputs * p.num_groups};
    CopyFeatureFactors<kCodes, Tile::kOutputs>(p, p.outputs + first, p.out, of_up);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
