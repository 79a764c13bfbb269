// Few rows, as skinny_fp8_gemm_cuda.cu: warps share the chunks of a tile of features, stream them through a ring each,
// and add their sums at the end. A chunk is 128 columns, 64 bytes of a row of codes, and has one to four scale groups.
//
// Each 32 columns a lane has a word of eight codes of a feature, and the same eight columns of x: 16 bytes. The order
// of columns inside a product of the tensor cores is free, so that neither is rearranged.
#include <algorithm>
#include <limits>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/gemm/int4_gemm_device.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/gemm/skinny_sums_device.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = kSkinnyWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 128, kStep = 32, kSteps = kChunk / kStep;  // columns; a step is a word of codes a lane

struct Params : Fp8GemmParams {  // w: the codes
  const uint8_t* zeros;
  int chunks_of_group;  // scale groups of whole chunks; else unused
};

constexpr int CodeBytes(int feature_tiles) { return 16 * feature_tiles * kChunk / 2; }
constexpr int StageBytes(int feature_tiles, int row_tiles) {
  return CodeBytes(feature_tiles) + 8 * row_tiles * kChunk * 2;
}
constexpr int SmemBytes(int feature_tiles, int row_tiles, int stages) {
  return kWarps * stages * StageBytes(feature_tiles, row_tiles) + SkinnySumsBytes(feature_tiles, row_tiles);
}
// As many stages as fit in the 227 KiB of a block of sm_90, eight at most.
constexpr int Stages(int feature_tiles, int row_tiles) {
  int stages = 2;
  while (stages < 8 && SmemBytes(feature_tiles, row_tiles, stages + 1) <= 227 * 1024) ++stages;
  return stages;
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

  const Params& p;
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
  __device__ void CopyW(uint32_t stage, const Position& at) const {  // eight rows at a time
    if (at.tile >= num_tiles) return;
    const int column = at.chunk * kChunk + lane % 4 * kStep;
#pragma unroll
    for (int n = 0; n < kFeatures / 8; ++n) {
      const int row = 8 * n + lane / 4;
      const int64_t feature = static_cast<int64_t>(at.tile) * kFeatures + row;
      const bool valid = column < p.in && feature < p.out;
      CpAsync16(stage + Int4CodeOffset(row, lane % 4), valid ? p.w + (feature * p.in + column) / 2 : p.w, valid);
    }
  }
  __device__ void CopyX(uint32_t stage, const Position& at) const {  // two rows at a time
    if (at.tile >= num_tiles) return;
    const int column = at.chunk * kChunk + lane % 16 * 8;
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles; ++n) {
      const int row = 2 * n + lane / 16;
      const bool valid = column < p.in && row < p.num_rows;
      CpAsync16(stage + kXBegin + Int4RowOffset(row, lane % 16),
                valid ? p.x + static_cast<int64_t>(row) * p.in + column : p.x, valid);
    }
  }
};

// Scales and zero points of this lane's features (16 f + g and 8 more) in a chunk. kGroupSteps: steps of a group, 1, 2
// or 4; groups of several chunks have 4.
template <int kFeatureTiles, int kGroupSteps>
struct Factors {
  static constexpr int kGroups = kSteps / kGroupSteps;
  float scale[kGroups][kFeatureTiles][2];
  uint32_t zero[kGroups][kFeatureTiles][2];

  __device__ Factors(const Params& p, int64_t feature0, int chunk) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int group = kGroupSteps < kSteps ? min(chunk * kGroups + i, p.num_groups - 1) : chunk / p.chunks_of_group;
#pragma unroll
      for (int f = 0; f < 2 * kFeatureTiles; ++f) {
        const int64_t feature = feature0 + 8 * f, at = feature * p.num_groups + group;
        scale[i][f / 2][f % 2] = feature < p.out ? __ldg(p.scales + at) : 0.0f;
        zero[i][f / 2][f % 2] = Int4Zero(feature < p.out ? __ldg(p.zeros + at) : 0u);
      }
    }
  }
};

// Adds the products of one chunk, group by group, to `total`.
template <int kFeatureTiles, int kRowTiles, int kGroupSteps>
__device__ void Multiply(uint32_t stage, int g, int c, const Factors<kFeatureTiles, kGroupSteps>& factors,
                         SkinnySums<kFeatureTiles, kRowTiles>& total) {
  constexpr int kXBegin = CodeBytes(kFeatureTiles);
#pragma unroll
  for (int group = 0; group < kSteps / kGroupSteps; ++group) {
    SkinnySums<kFeatureTiles, kRowTiles> sums;
#pragma unroll
    for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; ++step) {
      uint4 x[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) x[t] = LoadShared16(stage + kXBegin + Int4RowOffset(8 * t + g, 4 * step + c));
#pragma unroll
      for (int f = 0; f < kFeatureTiles; ++f) {
        const uint32_t low = LoadShared4(stage + Int4CodeOffset(16 * f + g, step) + 4 * c);
        const uint32_t high = LoadShared4(stage + Int4CodeOffset(16 * f + g + 8, step) + 4 * c);
        const auto& zero = factors.zero[group][f];
        const uint32_t first[4] = {WidenInt4Pair(low, 0, zero[0]), WidenInt4Pair(high, 0, zero[1]),
                                   WidenInt4Pair(low, 1, zero[0]), WidenInt4Pair(high, 1, zero[1])};
        const uint32_t second[4] = {WidenInt4Pair(low, 2, zero[0]), WidenInt4Pair(high, 2, zero[1]),
                                    WidenInt4Pair(low, 3, zero[0]), WidenInt4Pair(high, 3, zero[1])};
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          Mma16816(sums.of[f][t], first, x[t].x, x[t].y);
          Mma16816(sums.of[f][t], second, x[t].z, x[t].w);
        }
      }
    }
    total.AddScaled(sums, factors.scale[group]);
  }
}

template <int kFeatureTiles, int kRowTiles, int kGroupSteps, int kStages>
__global__ void __launch_bounds__(kThreads, 1) SkinnyKernel(const __grid_constant__ Params p) {
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
      const Factors<kFeatureTiles, kGroupSteps> factors(p, static_cast<int64_t>(tile) * Tile::kFeatures + g, chunk);
      CpAsyncWait<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
      chunks.CopyW(ring + load_stage * Tile::kStageBytes, next);
      chunks.CopyX(ring + load_stage * Tile::kStageBytes, next);
      chunks.Advance(next);
      CpAsyncCommit();
      if (++load_stage == kStages) load_stage = 0;
      Multiply<kFeatureTiles, kRowTiles, kGroupSteps>(ring + use_stage * Tile::kStageBytes, g, c, factors, total);
      if (++use_stage == kStages) use_stage = 0;
    }
    StoreSkinnyTile(total, tile, p.num_rows, p.out, shared,
                    [&](int row, int64_t feature, float sum) { StoreFp8Result(p, row, feature, sum); });
  }
  CpAsyncWait<0>();
}

template <int kFeatureTiles, int kRowTiles, int kGroupSteps, int kStages>
cudaError_t LaunchTiles(const Params& p, int num_sms, cudaStream_t stream) {
  constexpr int kSmem = SmemBytes(kFeatureTiles, kRowTiles, kStages);
  const auto kernel = SkinnyKernel<kFeatureTiles, kRowTiles, kGroupSteps, kStages>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  const int64_t tiles = (p.out + 16 * kFeatureTiles - 1) / (16 * kFeatureTiles);
  return LaunchEarly(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(tiles, num_sms))), dim3(kThreads), kSmem,
                     stream, p);
}

// Larger tiles read x less often; smaller ones divide more evenly over the SMs. `Cost` is the time of the busiest SM in
// units of 16 features of a chunk (1 KiB) from memory at the rate of the whole device: from the L2 cache, which x comes
// from, too, an SM reads twice as fast.
template <int kRowTiles, int kGroupSteps>
cudaError_t LaunchRows(const Params& p, int num_sms, int smem, cudaStream_t stream) {
  const auto cost = [&](int feature_tiles) {
    const int64_t tiles = (p.out + 16 * feature_tiles - 1) / (16 * feature_tiles);
    return (tiles + num_sms - 1) / num_sms * std::max(2 * feature_tiles, feature_tiles + 2 * kRowTiles);
  };
  if constexpr (kRowTiles <= 2 && kGroupSteps == kSteps) {
    constexpr int kStages = Stages(4, kRowTiles);
    if (cost(4) < std::min(cost(1), cost(2)) && smem >= SmemBytes(4, kRowTiles, kStages))
      return LaunchTiles<4, kRowTiles, kGroupSteps, kStages>(p, num_sms, stream);
  }
  constexpr int kStagesOf2 = Stages(2, kRowTiles), kStagesOf1 = Stages(1, kRowTiles);
  if (cost(2) <= cost(1) && smem >= SmemBytes(2, kRowTiles, kStagesOf2))
    return LaunchTiles<2, kRowTiles, kGroupSteps, kStagesOf2>(p, num_sms, stream);
  if (smem >= SmemBytes(1, kRowTiles, kStagesOf1))
    return LaunchTiles<1, kRowTiles, kGroupSteps, kStagesOf1>(p, num_sms, stream);
  return LaunchTiles<1, kRowTiles, kGroupSteps, 2>(p, num_sms, stream);
}

template <int kGroupSteps>
cudaError_t Launch(const Params& p, int row_tiles, int num_sms, int smem, cudaStream_t stream) {
  switch (row_tiles) {
    case 1:
      return LaunchRows<1, kGroupSteps>(p, num_sms, smem, stream);
    case 2:
      return LaunchRows<2, kGroupSteps>(p, num_sms, smem, stream);
    case 3:
      return LaunchRows<3, kGroupSteps>(p, num_sms, smem, stream);
    default:
      return LaunchRows<4, kGroupSteps>(p, num_sms, smem, stream);
  }
}

// Row tiles of one pass over W for `rows` rows: as many as there are, up to kMaxSkinnyRows and what fits with the
// smallest ring.
int RowTiles(int rows, int smem) {
  int tiles = std::min((rows + 7) / 8, static_cast<int>(kMaxSkinnyRows / 8));
  while (tiles > 1 && smem < SmemBytes(1, tiles, 2)) --tiles;
  return tiles;
}

Params ToParams(const Int4GemmArgs& a) {
  Params p{};
  static_cast<Fp8GemmParams&>(p) = ToCodesParams(a);
  p.zeros = a.zeros;
  p.chunks_of_group = a.scale_group == 0 ? std::numeric_limits<int>::max() : static_cast<int>(a.scale_group / kChunk);
  return p;
}

}  // namespace

cudaError_t SkinnyInt4Gemm(const Int4GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedInt4(a)) return cudaErrorNotSupported;
  int device = 0, num_sms = 0, smem = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const Params all = ToParams(a);
  for (int64_t row = 0; row < a.num_rows && e == cudaSuccess;) {
    Params p = all;
    const int tiles = RowTiles(static_cast<int>(a.num_rows - row), smem);
    p.num_rows = static_cast<int>(std::min<int64_t>(a.num_rows - row, 8 * tiles));
    p.x += row * p.in;
    p.y = static_cast<char*>(a.y) + row * p.y_stride * static_cast<int64_t>(DTypeBytes(a.y_dtype));
    row += p.num_rows;
    if (a.scale_group == 32)
      e = Launch<1>(p, tiles, num_sms, smem, stream);
    else if (a.scale_group == 64)
      e = Launch<2>(p, tiles, num_sms, smem, stream);
    else
      e = Launch<4>(p, tiles, num_sms, smem, stream);
  }
  return e;
}

}  // namespace spl::kernels::cuda
