// Grouped products by tensor cores: a block makes a tile of one expert's places times a stretch of its features, in
// stages of 64 or 128 columns. Sums ascend over in_features; with scales, the sum of each 128 columns of a scale group
// (fewer, if the group has fewer) is multiplied by its scale. So a place's bits depend on nothing else in the call, nor
// on which of the two shapes of tiles makes them.
#include <limits>

#include "kernels/cuda/cuda_types.h"
#include "kernels/moe/expert_codes_cuda.h"
#include "kernels/moe/expert_tile_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {
namespace {

struct Params {
  const __nv_bfloat16* x;
  const int32_t* rows;
  const int32_t* offsets;
  const char* w;
  const char* factors;  // [num_experts, num_groups, n]
  void* y;
  int num_experts, n, k, num_groups;
  int stages_of_group;  // where a scale group has whole stages
  bool y_is_f32;
};

// kRowWarps x kFeatureWarps warps, each with kRowTiles x 16 places and kFeatureTiles x 8 features.
template <int kRowWarps, int kFeatureWarps_, int kRowTiles_, int kFeatureTiles_, int kStages_, int kBlocks>
struct Shape {
  static constexpr int kFeatureWarps = kFeatureWarps_, kRowTiles = kRowTiles_, kFeatureTiles = kFeatureTiles_;
  static constexpr int kStages = kStages_, kBlocksOfSm = kBlocks;
  static constexpr int kThreads = 32 * kRowWarps * kFeatureWarps;
  static constexpr int kRows = 16 * kRowWarps * kRowTiles, kFeatures = 8 * kFeatureWarps * kFeatureTiles;
};
using FewRows = Shape<1, 4, 1, 2, 4, 3>;   // 16 places, 64 features: steps, which wait for memory
using ManyRows = Shape<2, 4, 2, 4, 3, 2>;  // 64 places, 128 features: prompts

template <typename Codes, typename S>
struct Stage {
  static constexpr int kWBegin = S::kRows * Codes::kColumns * 2;
  static constexpr int kFactorsBegin = kWBegin + S::kFeatures * Codes::kWeightRow;
  static constexpr int kBytes = kFactorsBegin + Codes::kGroups * S::kFeatures * Codes::kFactorBytes;
};

// A thread's part of the copies of a stage: the same pieces of 16 bytes in each.
template <typename Codes, typename S>
struct Loader {
  static constexpr int kXPieces = Codes::kColumns / 8, kXRows = S::kThreads / kXPieces, kX = S::kRows / kXRows;
  static constexpr int kWPieces = Codes::kWeightRow / 16, kWRows = S::kThreads / kWPieces, kW = S::kFeatures / kWRows;
  static constexpr int kWColumns = Codes::kColumns / kWPieces;  // of a piece
  static constexpr int kFactorPieces = S::kFeatures * Codes::kFactorBytes / 16;
  static_assert(S::kThreads % kXPieces == 0 && kX * kXRows == S::kRows && kW * kWRows == S::kFeatures);
  static_assert(Codes::kGroups * kFactorPieces <= S::kThreads);

  const Params& p;
  const ExpertTile tile;
  const int feature0, thread = static_cast<int>(threadIdx.x);
  int rows[kX];  // of x; -1 behind the tile's last place

  __device__ Loader(const Params& params, const ExpertTile& t, int feature) : p(params), tile(t), feature0(feature) {
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      const int place = tile.begin + thread / kXPieces + i * kXRows;
      rows[i] = place >= tile.end ? -1 : p.rows == nullptr ? place : p.rows[place];
    }
  }

  __device__ void Load(int index, uint32_t stage) const {
    const int at = index * Codes::kColumns;
    const int x_column = at + thread % kXPieces * 8;
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      const bool copy = rows[i] >= 0 && x_column < p.k;
      CpAsync16(stage + Codes::XOffset(thread / kXPieces + i * kXRows, thread % kXPieces),
                copy ? p.x + int64_t{rows[i]} * p.k + x_column : p.x, copy);
    }
    const int piece = thread % kWPieces, column = at + piece * kWColumns;
    const int64_t row_bytes = int64_t{p.k} * Codes::kBits / 8;
#pragma unroll
    for (int i = 0; i < kW; ++i) {
      const int row = thread / kWPieces + i * kWRows;
      const bool copy = feature0 + row < p.n && column < p.k;
      const char* from = p.w + (int64_t{tile.expert} * p.n + feature0 + row) * row_bytes + column * Codes::kBits / 8;
      CpAsync16(stage + Stage<Codes, S>::kWBegin + Codes::WeightOffset(row, piece), copy ? from : p.w, copy);
    }
    if constexpr (Codes::kGroups > 0) LoadFactors(index, stage + Stage<Codes, S>::kFactorsBegin);
  }

  __device__ void LoadFactors(int index, uint32_t to) const {
    constexpr int kOfPiece = 16 / Codes::kFactorBytes;  // features
    if (thread >= Codes::kGroups * kFactorPieces) return;
    const int group = Codes::kGroups == 1 ? index / p.stages_of_group : index * Codes::kGroups + thread / kFactorPieces;
    const int feature = feature0 + thread % kFactorPieces * kOfPiece;
    const bool copy = group < p.num_groups && feature < p.n;
    const int64_t from = (int64_t{tile.expert} * p.num_groups + group) * p.n + feature;
    CpAsync16(to + thread * 16, copy ? p.factors + from * Codes::kFactorBytes : p.factors, copy);
  }
};

template <typename S>
using Sums = float[S::kRowTiles][S::kFeatureTiles][4];

// total += sums * scale of the group; sums begin again. `feature` is the warp's first one.
template <typename Codes, typename S>
__device__ __forceinline__ void AddGroup(const char* factors, int feature, int lane, Sums<S>& sums, Sums<S>& total) {
#pragma unroll
  for (int j = 0; j < S::kFeatureTiles; ++j) {
    const float2 scale = Codes::ScalesOf(factors, feature + j * 8 + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < S::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[m][j][i] = fmaf(sums[m][j][i], i % 2 == 0 ? scale.x : scale.y, total[m][j][i]);
        sums[m][j][i] = 0;
      }
    }
  }
}

template <typename Codes, typename S>
__device__ __forceinline__ void MultiplyStage(const char* stage, int row, int feature, int lane, Sums<S>& total) {
  const uint32_t x = SmemAddress(stage), w = x + Stage<Codes, S>::kWBegin;
  if constexpr (Codes::kGroups == 0) {
#pragma unroll
    for (int step = 0; step < Codes::kSteps; ++step)
      Codes::template Multiply<S::kRowTiles, S::kFeatureTiles>(x, w, row, feature, step, lane, nullptr, total);
  } else {
    constexpr int kStepsOfGroup = Codes::kSteps / Codes::kGroups;
    Sums<S> sums = {};
#pragma unroll
    for (int group = 0; group < Codes::kGroups; ++group) {
      const char* factors = stage + Stage<Codes, S>::kFactorsBegin + group * S::kFeatures * Codes::kFactorBytes;
      typename Codes::Zeros zeros[S::kFeatureTiles];
#pragma unroll
      for (int j = 0; j < S::kFeatureTiles; ++j) zeros[j] = Codes::ZerosOf(factors, feature + j * 8 + lane / 4);
#pragma unroll
      for (int step = group * kStepsOfGroup; step < (group + 1) * kStepsOfGroup; ++step)
        Codes::template Multiply<S::kRowTiles, S::kFeatureTiles>(x, w, row, feature, step, lane, zeros, sums);
      AddGroup<Codes, S>(factors, feature, lane, sums, total);
    }
  }
}

__device__ __forceinline__ void StorePair(const Params& p, int64_t at, float a, float b) {
  if (p.y_is_f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.y) + at) = {a, b};
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.y) + at) = PackBf16(a, b);
  }
}

template <typename Codes, typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksOfSm) ExpertKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char smem[];
  const ExpertTile tile = FindExpertTile<S::kRows, S::kThreads>(p.offsets, p.num_experts, static_cast<int>(blockIdx.y));
  if (tile.expert < 0) return;
  constexpr int kStageBytes = Stage<Codes, S>::kBytes;
  const int feature0 = static_cast<int>(blockIdx.x) * S::kFeatures, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / S::kFeatureWarps * S::kRowTiles * 16;
  const int feature = warp % S::kFeatureWarps * S::kFeatureTiles * 8;
  const int num_stages = (p.k + Codes::kColumns - 1) / Codes::kColumns;
  const Loader<Codes, S> loader(p, tile, feature0);
  const auto load = [&](int index) {
    if (index < num_stages) loader.Load(index, SmemAddress(smem + index % S::kStages * kStageBytes));
    CpAsyncCommit();
  };
  Sums<S> total = {};
  for (int i = 0; i < S::kStages - 1; ++i) load(i);
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    CpAsyncWait<S::kStages - 2>();
    __syncthreads();
    load(i + S::kStages - 1);
    MultiplyStage<Codes, S>(smem + i % S::kStages * kStageBytes, row, feature, lane, total);
  }
#pragma unroll
  for (int m = 0; m < S::kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < S::kFeatureTiles; ++j) {
      const int column = feature0 + feature + j * 8 + lane % 4 * 2;
      if (column >= p.n) continue;  // n is even
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = tile.begin + row + m * 16 + lane / 4 + half * 8;
        if (place < tile.end)
          StorePair(p, int64_t{place} * p.n + column, total[m][j][half * 2], total[m][j][half * 2 + 1]);
      }
    }
  }
}

template <typename Codes, typename S>
cudaError_t LaunchShape(const Params& p, int64_t num_places, cudaStream_t stream) {
  constexpr int kSmem = S::kStages * Stage<Codes, S>::kBytes;
  const auto kernel = ExpertKernel<Codes, S>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>((p.n + S::kFeatures - 1) / S::kFeatures),
                  static_cast<unsigned>(MaxExpertTiles(num_places, p.num_experts, S::kRows)));
  kernel<<<grid, S::kThreads, kSmem, stream>>>(p);
  return cudaGetLastError();
}

// Tiles of 16 places read an expert's weight once if it has no more; beyond 8 in the mean, many have.
template <typename Codes>
cudaError_t Launch(const Params& p, int64_t num_places, cudaStream_t stream) {
  return num_places <= 8 * p.num_experts ? LaunchShape<Codes, FewRows>(p, num_places, stream)
                                         : LaunchShape<Codes, ManyRows>(p, num_places, stream);
}

}  // namespace

cudaError_t TiledGroupedLinear(const GroupedLinearArgs& a, cudaStream_t stream) {
  const auto& w = static_cast<const DeviceGroupedWeight&>(*a.weight);
  if (a.x.dtype != DType::kBF16 || (a.y.dtype != DType::kBF16 && a.y.dtype != DType::kF32) ||
      w.out_features() % 8 != 0 || w.in_features() % 8 != 0)
    return cudaErrorNotSupported;
  const int64_t group = w.scale_group();
  Params p{.x = static_cast<const __nv_bfloat16*>(a.x.data),
           .rows = a.rows,
           .offsets = a.offsets,
           .w = static_cast<const char*>(w.data()),
           .factors = static_cast<const char*>(w.factors()),
           .y = a.y.data,
           .num_experts = w.num_experts(),
           .n = static_cast<int>(w.out_features()),
           .k = static_cast<int>(w.in_features()),
           .num_groups = group == 0 ? 1 : static_cast<int>((w.in_features() + group - 1) / group),
           .stages_of_group = group == 0 ? std::numeric_limits<int>::max() : static_cast<int>(group / 128),
           .y_is_f32 = a.y.dtype == DType::kF32};
  switch (w.dtype()) {
    case DType::kBF16:
      return Launch<Bf16Experts>(p, a.num_places, stream);
    case DType::kE4M3:
      return Launch<Fp8Experts>(p, a.num_places, stream);
    case DType::kInt4:
      return group == 32   ? Launch<Int4Experts<4>>(p, a.num_places, stream)
             : group == 64 ? Launch<Int4Experts<2>>(p, a.num_places, stream)
                           : Launch<Int4Experts<1>>(p, a.num_places, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace spl::kernels::cuda
