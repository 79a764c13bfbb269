// Sums of a block that streams a weight with scales past few rows (skinny_fp8_gemm_cuda.cu, skinny_int4_gemm_cuda.cu).
// Included by .cu files only.
#pragma once

#include <cstdint>

namespace spl::kernels::cuda {

inline constexpr int kSkinnyWarps = 8;

constexpr int SkinnySumsBytes(int feature_tiles, int row_tiles) {
  return kSkinnyWarps * feature_tiles * row_tiles * 128 * 4;
}

// A warp's sums of a tile of 16 * kFeatureTiles features and 8 * kRowTiles rows: features g, g + 8 and rows 2 c, 2 c +
// 1 of each pair of tiles, for lane 4 g + c.
template <int kFeatureTiles, int kRowTiles>
struct SkinnySums {
  float of[kFeatureTiles][kRowTiles][4] = {};

  __device__ void AddScaled(const SkinnySums& sums, const float (&scale)[kFeatureTiles][2]) {
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) of[f][t][i] = fmaf(sums.of[f][t][i], scale[f][i / 2], of[f][t][i]);
      }
    }
  }
};

// Adds the sums of the block's warps, in their order, through `shared` (SkinnySumsBytes), and calls store(row, feature,
// sum) for each of `num_rows` rows and `out` features. All threads of the block call it.
template <int kFeatureTiles, int kRowTiles, typename StoreSum>
__device__ void StoreSkinnyTile(const SkinnySums<kFeatureTiles, kRowTiles>& total, int tile, int num_rows, int64_t out,
                                float* shared, const StoreSum& store) {
  constexpr int kSums = kFeatureTiles * kRowTiles * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // all have read the sums of the tile before
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const float(&of)[4] = total.of[f][t];
      *reinterpret_cast<float4*>(&shared[warp * kSums + (f * kRowTiles + t) * 128 + lane * 4]) =
          float4{of[0], of[1], of[2], of[3]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSums; i += 32 * kSkinnyWarps) {
    const int block = i / 128, in_block = i % 128, owner = in_block / 4, element = in_block % 4;
    const int row = block % kRowTiles * 8 + owner % 4 * 2 + element % 2;
    const int64_t feature =
        static_cast<int64_t>(tile) * 16 * kFeatureTiles + block / kRowTiles * 16 + owner / 4 + element / 2 * 8;
    if (row >= num_rows || feature >= out) continue;
    float sum = shared[i];
#pragma unroll
    for (int w = 1; w < kSkinnyWarps; ++w) sum += shared[w * kSums + i];
    store(row, feature, sum);
  }
}

}  // namespace spl::kernels::cuda
