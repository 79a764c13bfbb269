// How the products of few rows stream codes on Hopper: a ring of stages for each warp, and the scales and zero points
// of tiles (skinny_codes_gemm_cuda_sm90.cu, skinny_int4_digits_gemm_cuda_sm90.cu). Included by .cu files only.
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/skinny_codes_sm90.h"

namespace spl::kernels::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ int FeatureOf(int g) { return g >> 1 | (g & 1) << 2; }

// The stages of a warp's codes: its chunks of the block's tiles, in turn.
template <int kFeatures, int kWarps>
struct CodeRing {
  static constexpr int kStage = kFeatures * kRowBytes;
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
    TmaLoad2(codes + stage * kStage, &map, full + 8 * stage, chunk * kRowBytes, tile * kFeatures);
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

// Begins to copy the factors of a tile; all threads of the block call it.
template <Codes kCodes, int kFeatures, int kThreads>
__device__ __forceinline__ void CopyFactors(const Params& p, int tile, const TileFactors& to) {
  const int groups = p.num_groups, pitch = p.layout.scale_pitch;
  const int64_t begin = static_cast<int64_t>(tile) * kFeatures * groups;
  const auto count = static_cast<int>(min(int64_t{kFeatures} * groups, p.out * groups - begin));
  if (groups % 4 == 0 && reinterpret_cast<uintptr_t>(p.scales) % 16 == 0) {
    for (int i = threadIdx.x; i < count / 4; i += kThreads)
      CpAsync16(SmemAddress(to.scales + 4 * i + i / (groups / 4) * 4), p.scales + begin + 4 * i, true);
  } else {
    for (int i = threadIdx.x; i < count; i += kThreads)
      CpAsync4(SmemAddress(to.scales + i + i / groups * (pitch - groups)), p.scales + begin + i, 4);
  }
  if constexpr (kCodes == Codes::kInt4) {
    for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads)
      CpAsync4(SmemAddress(to.zeros + i), p.zeros + begin + i, min(4, count - i));
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
