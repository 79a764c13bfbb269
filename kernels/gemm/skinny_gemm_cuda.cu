// W is the left operand of mma m16n8k16, 16 features at a time, and x the right one, 8 rows at a time. One row
// therefore costs as much as eight, and all are summed in the same order.
//
// A block owns a tile of features and goes on to the next one a grid further. Its warps share the tile's columns in
// chunks of 64: warp w takes chunks w, w + kWarps, ... and streams them through a ring of its own (cp.async), which
// runs on from one tile into the next. The ring is filled before the block waits for x: while the small kernel that
// makes x runs, the memory is already busy with W. At the end of a tile the warps' sums are added in ascending order.
//
// The order of k within a pair of mma does not matter as long as both operands agree, so a lane takes 16 consecutive
// bytes of its rows (features and rows of x alike) as the operands of two mma: no ldmatrix. If there are few rows and
// few chunks per warp, x goes straight from global memory to the registers of the lane that multiplies it, once for all
// tiles. Otherwise x goes through the ring like W: loads to registers cannot be in flight long enough (they wait for
// all loads of W that the SM issued before, and a warp waits for the youngest of several).
//
// One block fills an SM. If two fitted, the next product's blocks would move in two at a time onto the first SMs that
// become free, and others would stay empty.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/gemm/skinny_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 64;  // columns: a cache line of a row of W

struct Params {
  const __nv_bfloat16* x;
  const __nv_bfloat16* w;
  const float* bias;
  void* y;
  int64_t out, in;
  int num_rows, num_tiles, num_chunks;
  bool y_is_f32;
};

// x stays in registers up to this many chunks a warp and rows; many rows take too long to come all at the start.
constexpr int kKeptChunks = 8;
constexpr int64_t kMaxKeptRows = 4;

// Bytes of a stage: W, and x if row_tiles > 0.
constexpr int StageBytes(int feature_tiles, int row_tiles) { return (16 * feature_tiles + 8 * row_tiles) * kChunk * 2; }
constexpr int SumsBytes(int feature_tiles, int row_tiles) { return kWarps * feature_tiles * row_tiles * 128 * 4; }
// Tiles of 48 features are mostly the only one of their block; those of 32 features and 32 rows leave no room for two.
constexpr int SumSets(int feature_tiles, int row_tiles) {
  return feature_tiles < 3 && feature_tiles * row_tiles < 8 ? 2 : 1;
}
constexpr int SmemBytes(int feature_tiles, int row_tiles, bool x_in_ring, int stages) {
  return kWarps * stages * StageBytes(feature_tiles, x_in_ring ? row_tiles : 0) +
         SumSets(feature_tiles, row_tiles) * SumsBytes(feature_tiles, row_tiles);
}

// 16-byte piece `piece` of a line of the ring. Eight lanes of an LDS.128 read four pieces of two neighbouring rows.
__device__ __forceinline__ uint32_t PieceOffset(int row, int piece) {
  return static_cast<uint32_t>(row * (kChunk * 2) + ((piece ^ (row % 2 * 4)) * 16));
}

// kFeatureTiles of 16 features, kRowTiles of 8 rows of x.
template <int kFeatureTiles, int kRowTiles, bool kXInRing, int kStages>
__global__ void __launch_bounds__(kThreads, 1) SkinnyGemmKernel(const __grid_constant__ Params p) {
  constexpr int kFeatures = 16 * kFeatureTiles;
  constexpr int kStageBytes = StageBytes(kFeatureTiles, kXInRing ? kRowTiles : 0);
  constexpr int kXBegin = StageBytes(kFeatureTiles, 0);   // offset of x in a stage
  constexpr int kSums = kFeatureTiles * kRowTiles * 128;  // sums of a tile
  constexpr int kSets = SumSets(kFeatureTiles, kRowTiles);
  static_assert(kStages >= 2);
  extern __shared__ __align__(128) char smem[];
  LetNextStart();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, c = lane % 4;
  const uint32_t ring = SmemAddress(smem) + warp * kStages * kStageBytes;
  float* const sums = reinterpret_cast<float*>(smem + kWarps * kStages * kStageBytes);

  const auto copy_w = [&](uint32_t stage, int tile, int chunk) {
    const int64_t feature = static_cast<int64_t>(tile) * kFeatures + lane / 8;
    const int column = chunk * kChunk + lane % 8 * 8;
    const __nv_bfloat16* from = p.w + feature * p.in + column;
#pragma unroll
    for (int n = 0; n < kFeatures / 4; ++n) {
      CpAsync16(stage + PieceOffset(4 * n + lane / 8, lane % 8), from + 4 * n * p.in,
                column < p.in && feature + 4 * n < p.out);
    }
  };
  const auto copy_x = [&](uint32_t stage, int chunk) {
    const int column = chunk * kChunk + lane % 8 * 8;
#pragma unroll
    for (int n = 0; n < 2 * kRowTiles; ++n) {
      const int row = 4 * n + lane / 8;
      CpAsync16(stage + kXBegin + PieceOffset(row, lane % 8), p.x + static_cast<int64_t>(row) * p.in + column,
                column < p.in && row < p.num_rows);
    }
  };
  struct Position {
    int tile, chunk;
  };
  // This warp's chunks of this block's tiles in turn; a warp without a chunk is past the last tile from the start.
  const Position begin{warp < p.num_chunks ? static_cast<int>(blockIdx.x) : p.num_tiles, warp};
  const auto advance = [&](Position& at) {
    at.chunk += kWarps;
    if (at.chunk >= p.num_chunks) {
      at.chunk = warp;
      at.tile += gridDim.x;
    }
  };
  Position next = begin;
  int load_stage = 0;
  const auto copy_next = [&](bool with_x) {
    if (next.tile < p.num_tiles) {
      const uint32_t stage = ring + load_stage * kStageBytes;
      copy_w(stage, next.tile, next.chunk);
      if (with_x) copy_x(stage, next.chunk);
      advance(next);
    }
    if (++load_stage == kStages) load_stage = 0;
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    copy_next(false);
    if constexpr (!kXInRing) CpAsyncCommit();
  }
  WaitForPrevious();

  // As right operand: this lane's row g, and of every half chunk its columns 8 c ... 8 c + 7.
  uint4 kept[kXInRing ? 1 : kKeptChunks][kRowTiles][2];
  if constexpr (kXInRing) {
    // The first group is all of W so far and one chunk of x.
    Position at = begin;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (at.tile < p.num_tiles) copy_x(ring + i * kStageBytes, at.chunk);
      advance(at);
      CpAsyncCommit();
    }
  } else {
#pragma unroll
    for (int d = 0; d < kKeptChunks; ++d) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const int row = 8 * t + g;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = (kWarps * d + warp) * kChunk + 32 * h + 8 * c;
          kept[d][t][h] = row < p.num_rows && column < p.in
                              ? *reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(row) * p.in + column)
                              : uint4{0, 0, 0, 0};
        }
      }
    }
  }

  int use_stage = 0, turn = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x, turn ^= 1) {
    float acc[kFeatureTiles][kRowTiles][4] = {};  // features g, g + 8; rows 2 c, 2 c + 1
    const auto multiply = [&](const uint4(&x)[kRowTiles][2]) {
      CpAsyncWait<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
      copy_next(kXInRing);
      CpAsyncCommit();
      const uint32_t stage = ring + use_stage * kStageBytes;
      if (++use_stage == kStages) use_stage = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4 right[kRowTiles];
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          right[t] = kXInRing ? LoadShared16(stage + kXBegin + PieceOffset(8 * t + g, 4 * h + c)) : x[t][h];
        }
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
          const uint4 low = LoadShared16(stage + PieceOffset(16 * f + g, 4 * h + c));
          const uint4 high = LoadShared16(stage + PieceOffset(16 * f + g + 8, 4 * h + c));
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            Mma16816(acc[f][t], first, right[t].x, right[t].y);
            Mma16816(acc[f][t], second, right[t].z, right[t].w);
          }
        }
      }
    };
    if constexpr (kXInRing) {
#pragma unroll 1
      for (int chunk = warp; chunk < p.num_chunks; chunk += kWarps) multiply(kept[0]);
    } else {
#pragma unroll
      for (int d = 0; d < kKeptChunks; ++d) {
        if (kWarps * d + warp < p.num_chunks) multiply(kept[d]);
      }
    }
    // Two sets of sums in turn: a set is written again only after all have passed the barrier of the other one. With
    // one set there is one more barrier.
    if (kSets == 1) __syncthreads();
    float* const set = sums + (kSets == 1 ? 0 : turn) * kWarps * kSums;
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        *reinterpret_cast<float4*>(&set[warp * kSums + (f * kRowTiles + t) * 128 + lane * 4]) =
            float4{acc[f][t][0], acc[f][t][1], acc[f][t][2], acc[f][t][3]};
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSums; i += kThreads) {
      const int block = i / 128, in_block = i % 128, owner = in_block / 4, element = in_block % 4;
      const int row = block % kRowTiles * 8 + owner % 4 * 2 + element % 2;
      const int64_t feature =
          static_cast<int64_t>(tile) * kFeatures + block / kRowTiles * 16 + owner / 4 + element / 2 * 8;
      if (row >= p.num_rows || feature >= p.out) continue;
      float sum = set[i];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += set[w * kSums + i];
      if (p.bias != nullptr) sum += p.bias[feature];
      const int64_t at = row * p.out + feature;
      if (p.y_is_f32) {
        static_cast<float*>(p.y)[at] = sum;
      } else {
        static_cast<__nv_bfloat16*>(p.y)[at] = FromF<__nv_bfloat16>(sum);
      }
    }
  }
  CpAsyncWait<0>();
}

template <int kFeatureTiles, int kRowTiles, bool kXInRing, int kStages>
cudaError_t Launch(Params p, int num_sms, cudaStream_t stream) {
  constexpr int kSmem = SmemBytes(kFeatureTiles, kRowTiles, kXInRing, kStages);
  const auto kernel = SkinnyGemmKernel<kFeatureTiles, kRowTiles, kXInRing, kStages>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  p.num_tiles = static_cast<int>((p.out + 16 * kFeatureTiles - 1) / (16 * kFeatureTiles));
  return LaunchEarly(kernel, dim3(static_cast<unsigned>(std::min(p.num_tiles, num_sms))), dim3(kThreads), kSmem, stream,
                     p);
}

// The deepest ring that fits: a block of sm_90 has 227 KiB, of sm_80 163, of sm_86 and sm_89 99.
template <int kFeatureTiles, int kRowTiles, bool kXInRing, int kDeep, int kShallow>
cudaError_t LaunchFitting(const Params& p, int num_sms, int smem_per_block, cudaStream_t stream) {
  if (smem_per_block >= SmemBytes(kFeatureTiles, kRowTiles, kXInRing, kDeep))
    return Launch<kFeatureTiles, kRowTiles, kXInRing, kDeep>(p, num_sms, stream);
  return Launch<kFeatureTiles, kRowTiles, kXInRing, kShallow>(p, num_sms, stream);
}

template <int kRowTiles>
cudaError_t LaunchRows(const Params& p, int num_sms, int smem_per_block, cudaStream_t stream) {
  if (kRowTiles == 1 && p.num_rows <= kMaxKeptRows && p.num_chunks <= kWarps * kKeptChunks)
    return LaunchFitting<1, 1, false, 12, 4>(p, num_sms, smem_per_block, stream);
  // By the number of row tiles: what fits into 227 KiB beside the sums, or less where that is as fast.
  constexpr int kStages[4][3] = {{8, 5, 3}, {6, 4, 3}, {5, 3, 2}, {4, 3, 2}};
  constexpr int kStagesOf1 = kStages[kRowTiles - 1][0], kStagesOf2 = kStages[kRowTiles - 1][1],
                kStagesOf3 = kStages[kRowTiles - 1][2];
  // Devices without room for that leave more than 16 rows to cuBLASLt.
  if (kRowTiles > 2 && smem_per_block < SmemBytes(1, kRowTiles, true, kStagesOf1)) return cudaErrorNotSupported;
  if (smem_per_block >= SmemBytes(3, kRowTiles, true, kStagesOf3)) {
    // The time of a launch is that of the block with the most features; larger tiles read x less often.
    const auto most = [&](int feature_tiles) {
      const int64_t tiles = (p.out + 16 * feature_tiles - 1) / (16 * feature_tiles);
      return (tiles + num_sms - 1) / num_sms * feature_tiles;
    };
    const auto about_as_few = [&](int feature_tiles) { return 100 * most(feature_tiles) <= 103 * most(1); };
    if (about_as_few(2) && most(2) <= most(3)) return Launch<2, kRowTiles, true, kStagesOf2>(p, num_sms, stream);
    if (about_as_few(3)) return Launch<3, kRowTiles, true, kStagesOf3>(p, num_sms, stream);
  }
  if constexpr (kRowTiles > 2) {
    return Launch<1, kRowTiles, true, kStagesOf1>(p, num_sms, stream);
  } else {
    constexpr int kShallowOf1 = kRowTiles == 1 ? 3 : 2;
    return LaunchFitting<1, kRowTiles, true, kStagesOf1, kShallowOf1>(p, num_sms, smem_per_block, stream);
  }
}

bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t SkinnyGemm(const SkinnyGemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.num_rows < 0 || a.num_rows > kMaxSkinnyRows || a.in_features % 8 != 0 || a.in_features < 8 ||
      a.out_features < 1 || a.in_features > (1 << 30) || a.out_features > (1 << 30) || !Aligned16(a.x) ||
      !Aligned16(a.w) || (a.y_dtype != DType::kF32 && a.y_dtype != DType::kBF16)) {
    return cudaErrorNotSupported;
  }
  int device = 0, num_sms = 0, smem_per_block = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const Params p{.x = static_cast<const __nv_bfloat16*>(a.x),
                 .w = static_cast<const __nv_bfloat16*>(a.w),
                 .bias = a.bias,
                 .y = a.y,
                 .out = a.out_features,
                 .in = a.in_features,
                 .num_rows = static_cast<int>(a.num_rows),
                 .num_tiles = 0,
                 .num_chunks = static_cast<int>((a.in_features + kChunk - 1) / kChunk),
                 .y_is_f32 = a.y_dtype == DType::kF32};
  if (a.num_rows <= 8) return LaunchRows<1>(p, num_sms, smem_per_block, stream);
  if (a.num_rows <= 16) return LaunchRows<2>(p, num_sms, smem_per_block, stream);
  if (a.num_rows <= 24) return LaunchRows<3>(p, num_sms, smem_per_block, stream);
  return LaunchRows<4>(p, num_sms, smem_per_block, stream);
}

}  // namespace spl::kernels::cuda
