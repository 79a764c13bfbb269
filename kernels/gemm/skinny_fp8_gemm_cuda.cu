// Few rows, as skinny_gemm_cuda.cu. A chunk is 128 columns, so that a row of its codes is a line of the cache, and a
// scale group, so that its sums are scaled when it is done.
//
// A block owns a tile of features and goes on to the next one a grid further. Its warps share the tile's chunks and
// stream them through a ring each; at the end of a tile their sums are added in ascending order. x goes through the
// ring, too: rows that are not there cost nothing.
#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/gemm/skinny_sums_device.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = kSkinnyWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = kFp8Group;

constexpr int CodeBytes(int feature_tiles) { return 16 * feature_tiles * kChunk; }
constexpr int StageBytes(int feature_tiles, int row_tiles) {
  return CodeBytes(feature_tiles) + 8 * row_tiles * kChunk * 2;
}
constexpr int SmemBytes(int feature_tiles, int row_tiles, int stages) {
  return kWarps * stages * StageBytes(feature_tiles, row_tiles) + SkinnySumsBytes(feature_tiles, row_tiles);
}

// 16-byte piece `piece` of a row of codes. Half a warp reads 32 bytes of four rows, which lie in different banks.
__device__ __forceinline__ uint32_t CodeOffset(int row, int piece) {
  return static_cast<uint32_t>(row * kChunk + ((piece ^ ((row & 3) << 1)) * 16));
}
// The same for a row of x: half a warp reads 8 bytes of every other piece of 64 bytes, of four rows.
__device__ __forceinline__ uint32_t RowOffset(int row, int piece) {
  return static_cast<uint32_t>(row * kChunk * 2 + ((piece ^ ((row & 1) << 2 | (row >> 1 & 1))) * 16));
}

__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
// One warp's way through its chunks: where it loads from, and its ring.
template <int kFeatureTiles, int kRowTiles>
struct Chunks {
  static constexpr int kFeatures = 16 * kFeatureTiles;
  static constexpr int kStageBytes = StageBytes(kFeatureTiles, kRowTiles);
  static constexpr int kXBegin = CodeBytes(kFeatureTiles);  // offset of x in a stage
  struct Position {
    int tile, chunk;
  };

  const Fp8GemmParams& p;
  const int lane, warp, num_tiles, num_chunks;

  // A warp without a chunk is past the last tile from the start.
  __device__ Position Begin() const { return {warp < num_chunks ? static_cast<int>(blockIdx.x) : num_tiles, warp}; }
  __device__ void Advance(Position& at) const {
    at.chunk += kWarps;
    if (at.chunk >= num_chunks) {
      at.chunk = warp;
      at.tile += gridDim.x;
    }
  }
  __device__ void CopyW(uint32_t stage, const Position& at) const {  // four rows at a time
    if (at.tile >= num_tiles) return;
    const int column = at.chunk * kChunk + lane % 8 * 16;
#pragma unroll
    for (int n = 0; n < kFeatures / 4; ++n) {
      const int row = 4 * n + lane / 8;
      const int64_t feature = static_cast<int64_t>(at.tile) * kFeatures + row;
      const bool valid = column < p.in && feature < p.out;
      CpAsync16(stage + CodeOffset(row, lane % 8), valid ? p.w + feature * p.in + column : p.w, valid);
    }
  }
  __device__ void CopyX(uint32_t stage, const Position& at) const {  // two rows at a time
    if (at.tile >= num_tiles) return;
    const int column = at.chunk * kChunk + lane % 16 * 8;
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) {
      const int row = 2 * n + lane / 16;
      const bool valid = column < p.in && row < p.num_rows;
      CpAsync16(stage + kXBegin + RowOffset(row, lane % 16),
                valid ? p.x + static_cast<int64_t>(row) * p.in + column : p.x, valid);
    }
  }
};

// Adds the products of one chunk. Lane c has two words of codes of each 32 columns, and the same columns of x: 16 j +
// 4 i ... + 3 and 8 more, j = 2 h + c / 2, i = c % 2.
template <int kFeatureTiles, int kRowTiles>
__device__ void Multiply(uint32_t stage, int g, int c, SkinnySums<kFeatureTiles, kRowTiles>& sums) {
  constexpr int kXBegin = CodeBytes(kFeatureTiles);
#pragma unroll
  for (int h = 0; h < kChunk / 32; ++h) {
    const int piece = 2 * h + c / 2, half = c % 2 * 8;
    uint2 right[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        right[t][i] = LoadShared8(stage + kXBegin + RowOffset(8 * t + g, 2 * piece + i) + half);
    }
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
      const uint2 low = LoadShared8(stage + CodeOffset(16 * f + g, piece) + half);
      const uint2 high = LoadShared8(stage + CodeOffset(16 * f + g + 8, piece) + half);
      uint32_t first[4], second[4];
      WidenFp8Word(low.x, first[0], first[2]);
      WidenFp8Word(high.x, first[1], first[3]);
      WidenFp8Word(low.y, second[0], second[2]);
      WidenFp8Word(high.y, second[1], second[3]);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        Mma16816(sums.of[f][t], first, right[t][0].x, right[t][1].x);
        Mma16816(sums.of[f][t], second, right[t][0].y, right[t][1].y);
      }
    }
  }
}

template <int kFeatureTiles, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kThreads, 1) SkinnyKernel(const __grid_constant__ Fp8GemmParams p) {
  using Tile = Chunks<kFeatureTiles, kRowTiles>;
  static_assert(kStages >= 2);
  extern __shared__ __align__(128) char smem[];
  LetNextStart();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const Tile chunks{p, lane, warp, static_cast<int>((p.out + Tile::kFeatures - 1) / Tile::kFeatures),
                    static_cast<int>((p.in + kChunk - 1) / kChunk)};
  const uint32_t ring = SmemAddress(smem) + warp * kStages * Tile::kStageBytes;
  float* const shared = reinterpret_cast<float*>(smem + kWarps * kStages * Tile::kStageBytes);
  typename Tile::Position next = chunks.Begin(), at_x = next;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {  // while the kernel in front may still be making x
    chunks.CopyW(ring + i * Tile::kStageBytes, next);
    chunks.Advance(next);
  }
  WaitForPrevious();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {  // the first group is all of W so far and one chunk of x
    chunks.CopyX(ring + i * Tile::kStageBytes, at_x);
    chunks.Advance(at_x);
    CpAsyncCommit();
  }
  int use_stage = 0, load_stage = kStages - 1;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < chunks.num_tiles; tile += gridDim.x) {
    SkinnySums<kFeatureTiles, kRowTiles> total;
#pragma unroll 1
    for (int chunk = warp; chunk < chunks.num_chunks; chunk += kWarps) {
      float scale[kFeatureTiles][2];  // of this lane's features
#pragma unroll
      for (int f = 0; p.num_groups > 1 && f < 2 * kFeatureTiles; ++f) {
        const int64_t feature = static_cast<int64_t>(tile) * Tile::kFeatures + 8 * f + g;
        scale[f / 2][f % 2] = feature < p.out ? __ldg(p.scales + feature * p.num_groups + chunk) : 0.0f;
      }
      CpAsyncWait<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
      chunks.CopyW(ring + load_stage * Tile::kStageBytes, next);
      chunks.CopyX(ring + load_stage * Tile::kStageBytes, next);
      chunks.Advance(next);
      CpAsyncCommit();
      if (++load_stage == kStages) load_stage = 0;
      const uint32_t stage = ring + use_stage * Tile::kStageBytes;
      if (++use_stage == kStages) use_stage = 0;
      if (p.num_groups > 1) {
        SkinnySums<kFeatureTiles, kRowTiles> of_chunk;
        Multiply(stage, g, c, of_chunk);
        total.AddScaled(of_chunk, scale);
      } else {
        Multiply(stage, g, c, total);
      }
    }
    StoreSkinnyTile(total, tile, p.num_rows, p.out, shared, [&](int row, int64_t feature, float sum) {
      StoreFp8Result(p, row, feature, p.num_groups > 1 ? sum : sum * p.scales[feature]);
    });
  }
  CpAsyncWait<0>();
}

template <int kFeatureTiles, int kRowTiles, int kStages>
cudaError_t Launch(const Fp8GemmParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kSmem = SmemBytes(kFeatureTiles, kRowTiles, kStages);
  const auto kernel = SkinnyKernel<kFeatureTiles, kRowTiles, kStages>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  const int64_t tiles = (p.out + 16 * kFeatureTiles - 1) / (16 * kFeatureTiles);
  return LaunchEarly(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(tiles, num_sms))), dim3(kThreads), kSmem,
                     stream, p);
}

// The largest tile and the deepest ring that fit: a block of sm_90 has 227 KiB, of sm_80 163, of sm_86 and sm_89 99.
template <int kRowTiles>
cudaError_t LaunchRows(const Fp8GemmParams& p, int num_sms, int smem, cudaStream_t stream) {
  constexpr int kStages[4][2] = {{6, 4}, {3, 3}, {3, 2}, {2, 2}};
  constexpr int kStagesOf1 = kStages[kRowTiles - 1][0], kStagesOf2 = kStages[kRowTiles - 1][1];
  // Tiles of 32 features read x less often; tiles of 16 divide evenly over the SMs more often.
  const auto most = [&](int feature_tiles) {
    const int64_t tiles = (p.out + 16 * feature_tiles - 1) / (16 * feature_tiles);
    return (tiles + num_sms - 1) / num_sms * feature_tiles;
  };
  if (100 * most(2) <= 103 * most(1) && smem >= SmemBytes(2, kRowTiles, kStagesOf2)) {
    return Launch<2, kRowTiles, kStagesOf2>(p, num_sms, stream);
  }
  if (kRowTiles > 1 || smem >= SmemBytes(1, kRowTiles, kStagesOf1)) {
    return Launch<1, kRowTiles, kStagesOf1>(p, num_sms, stream);
  }
  return Launch<1, kRowTiles, 2>(p, num_sms, stream);
}

// Row tiles of one pass over W for `rows` rows: as many as there are, up to kMaxSkinnyRows and what fits.
int RowTiles(int rows, int smem) {
  const int tiles = std::min((rows + 7) / 8, static_cast<int>(kMaxSkinnyRows / 8));
  if (tiles > 2 && smem >= SmemBytes(1, tiles, tiles == 3 ? 3 : 2)) return tiles;
  return tiles > 1 && smem >= SmemBytes(1, 2, 3) ? 2 : 1;
}

}  // namespace

cudaError_t SkinnyFp8Gemm(const Fp8GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedFp8(a)) return cudaErrorNotSupported;
  int device = 0, num_sms = 0, smem = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const Fp8GemmParams all = ToFp8Params(a);
  for (int row = 0; row < all.num_rows && e == cudaSuccess;) {
    Fp8GemmParams p = all;
    const int tiles = RowTiles(all.num_rows - row, smem);
    p.num_rows = std::min(all.num_rows - row, 8 * tiles);
    p.x += static_cast<int64_t>(row) * p.in;
    p.y = static_cast<char*>(a.y) + row * p.y_stride * static_cast<int64_t>(DTypeBytes(a.y_dtype));
    row += p.num_rows;
    if (tiles == 1) e = LaunchRows<1>(p, num_sms, smem, stream);
    if (tiles == 2) e = LaunchRows<2>(p, num_sms, smem, stream);
    if (tiles == 3) e = LaunchRows<3>(p, num_sms, smem, stream);
    if (tiles == 4) e = LaunchRows<4>(p, num_sms, smem, stream);
  }
  return e;
}

}  // namespace spl::kernels::cuda
