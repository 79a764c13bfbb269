// W is the left operand of mma m16n8k16, 16 features at a time, and x the right one, 8 rows at a time, so that one row
// costs what eight do and all are summed in the same order.
//
// A block owns a tile of features and goes on to the next one a grid further. Its warps share the tile's columns in
// chunks of 64: warp w takes chunks w, w + kWarps, ... and streams them through a ring of its own (cp.async), which
// runs on from one tile into the next. The ring is filled before the block waits for x: while the small kernel that
// makes x runs, the memory is already busy with W. At the end of a tile the warps' sums are added in ascending order.
//
// The order of k within a pair of mma does not matter as long as both operands agree, so a lane takes 16 consecutive
// bytes of its rows (features and rows of x alike) as the operands of two mma: no ldmatrix, and x comes straight from
// global memory, where the tiles after the first find it in L1.
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

constexpr int StageBytes(int feature_tiles) { return 16 * feature_tiles * kChunk * 2; }
constexpr int SumsBytes(int feature_tiles, int row_tiles) { return kWarps * feature_tiles * row_tiles * 128 * 4; }
constexpr int SmemBytes(int feature_tiles, int row_tiles, int stages) {
  return kWarps * stages * StageBytes(feature_tiles) + 2 * SumsBytes(feature_tiles, row_tiles);
}

// 16-byte piece `piece` of a line of the ring. Eight lanes of an LDS.128 read four pieces of two neighbouring rows.
__device__ __forceinline__ uint32_t PieceOffset(int row, int piece) {
  return static_cast<uint32_t>(row * (kChunk * 2) + ((piece ^ (row % 2 * 4)) * 16));
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// kFeatureTiles of 16 features, kRowTiles of 8 rows of x.
template <int kFeatureTiles, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kThreads) SkinnyGemmKernel(const __grid_constant__ Params p) {
  constexpr int kFeatures = 16 * kFeatureTiles;
  constexpr int kStageBytes = StageBytes(kFeatureTiles);
  constexpr int kSums = kFeatureTiles * kRowTiles * 128;  // of a tile
  extern __shared__ __align__(128) char smem[];
  LetNextStart();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, c = lane % 4;
  const uint32_t ring = SmemAddress(smem) + warp * kStages * kStageBytes;
  float* const sums = reinterpret_cast<float*>(smem + kWarps * kStages * kStageBytes);

  int load_tile = warp < p.num_chunks ? static_cast<int>(blockIdx.x) : p.num_tiles, load_chunk = warp, load_stage = 0;
  const auto copy_next = [&] {
    if (load_tile < p.num_tiles) {
      const int64_t feature = static_cast<int64_t>(load_tile) * kFeatures + lane / 8;
      const int column = load_chunk * kChunk + lane % 8 * 8;
      const __nv_bfloat16* from = p.w + feature * p.in + column;
#pragma unroll
      for (int n = 0; n < kFeatures / 4; ++n) {
        const int row = 4 * n + lane / 8;
        CpAsync16(ring + load_stage * kStageBytes + PieceOffset(row, lane % 8), from + 4 * n * p.in,
                  column < p.in && feature + 4 * n < p.out);
      }
      load_chunk += kWarps;
      if (load_chunk >= p.num_chunks) {
        load_chunk = warp;
        load_tile += gridDim.x;
      }
    }
    CpAsyncCommit();
    if (++load_stage == kStages) load_stage = 0;
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copy_next();

  // As right operand: this lane's row g, and of every half chunk its columns 8 c ... 8 c + 7.
  uint4 x_next[kRowTiles][2];
  const auto load_x = [&](int chunk) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int row = 8 * t + g;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = chunk * kChunk + 32 * h + 8 * c;
        x_next[t][h] = row < p.num_rows && column < p.in
                           ? *reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(row) * p.in + column)
                           : uint4{0, 0, 0, 0};
      }
    }
  };
  WaitForPrevious();
  load_x(warp);

  int use_stage = 0, turn = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x, turn ^= 1) {
    float acc[kFeatureTiles][kRowTiles][4] = {};  // features g, g + 8; rows 2 c, 2 c + 1
#pragma unroll 1
    for (int chunk = warp; chunk < p.num_chunks; chunk += kWarps) {
      uint4 x[kRowTiles][2];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) x[t][0] = x_next[t][0], x[t][1] = x_next[t][1];
      CpAsyncWait<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
      copy_next();
      load_x(chunk + kWarps < p.num_chunks ? chunk + kWarps : warp);
      const uint32_t stage = ring + use_stage * kStageBytes;
      if (++use_stage == kStages) use_stage = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f) {
          const uint4 low = LoadShared16(stage + PieceOffset(16 * f + g, 4 * h + c));
          const uint4 high = LoadShared16(stage + PieceOffset(16 * f + g + 8, 4 * h + c));
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            Mma16816(acc[f][t], first, x[t][h].x, x[t][h].y);
            Mma16816(acc[f][t], second, x[t][h].z, x[t][h].w);
          }
        }
      }
    }
    // Two sets of sums in turn: nobody writes a set again before all have passed the barrier of the other one.
    float* const set = sums + turn * kWarps * kSums;
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

template <int kFeatureTiles, int kRowTiles, int kStages>
cudaError_t Launch(const Params& p, int num_sms, cudaStream_t stream) {
  constexpr int kSmem = SmemBytes(kFeatureTiles, kRowTiles, kStages);
  const auto kernel = SkinnyGemmKernel<kFeatureTiles, kRowTiles, kStages>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  return LaunchEarly(kernel, dim3(static_cast<unsigned>(std::min(p.num_tiles, num_sms))), dim3(kThreads), kSmem, stream,
                     p);
}

template <int kRowTiles>
cudaError_t LaunchRows(Params p, int num_sms, int smem_per_block, cudaStream_t stream) {
  const auto tiles = [&](int features) { return static_cast<int>((p.out + features - 1) / features); };
  // The time of a launch is that of the block with the most tiles. Tiles of 32 read x half as often; they are taken
  // unless they leave blocks idle.
  const auto turns = [&](int features) { return (tiles(features) + num_sms - 1) / num_sms; };
  const bool wide = smem_per_block >= SmemBytes(2, kRowTiles, 5) && 64 * turns(32) <= 33 * turns(16);
  p.num_tiles = tiles(wide ? 32 : 16);
  if (wide) return Launch<2, kRowTiles, 5>(p, num_sms, stream);
  if (smem_per_block >= SmemBytes(1, kRowTiles, 8)) return Launch<1, kRowTiles, 8>(p, num_sms, stream);
  return Launch<1, kRowTiles, 4>(p, num_sms, stream);  // sm_86, sm_89: 99 KiB a block
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
  return LaunchRows<4>(p, num_sms, smem_per_block, stream);
}

}  // namespace spl::kernels::cuda
