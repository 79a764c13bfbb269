// Few rows and a weight of FP8 or int4 codes on Hopper, which take as long as reading the codes once. Two things make
// the difference to skinny_fp8_gemm_cuda.cu:
//   f16     e4m3 and 64 + an int4 code are exact in f16, and there an instruction widens two e4m3 codes, three four
//           int4 codes. x is bf16: each 128 columns of a row are multiplied by a power of two that takes the largest to
//           [2^14, 2^15), which loses nothing but bits below 2^-38 of it, and their sum is divided by it
//   x       is converted once a block and stays in shared memory, so that the ring has codes only and one thread of a
//           warp loads a stage with one instruction
//
// A block owns a tile of features and goes on to the next one a grid further. Its warps share the tile's chunks and
// stream them through a ring each; a warp meets the same columns in every tile, so that it converts the x that it
// multiplies. At the end of a tile the warps' sums are added in ascending order.
//
// The columns of a product of the tensor cores may stand in any order that both operands share. Lane 4 g + c reads 16
// bytes of codes of a feature, those of piece c, and makes left operands of them as they come; x is stored in their
// order. Its features are 16 f + FeatureOf(g) and 8 more: two rows of codes that lanes read at one time then differ in
// bit 2 of their number, and lie in different banks.
#include <algorithm>

#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/int4_gemm_device.h"
#include "kernels/gemm/resident_x_sm90.h"
#include "kernels/gemm/skinny_codes_launch_sm90.h"
#include "kernels/gemm/skinny_codes_ring_sm90.h"
#include "kernels/gemm/skinny_codes_sm90.h"

namespace spl::kernels::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Two e4m3 codes, exactly.
__device__ __forceinline__ uint32_t WidenE4M3(uint32_t codes) {
  uint32_t halves;
  asm("{\n.reg .b16 pair, other;\nmov.b32 {pair, other}, %1;\ncvt.rn.f16x2.e4m3x2 %0, pair;\n}"
      : "=r"(halves)
      : "r"(codes));
  return halves;
}
// 64 + the codes of bits 4 to 7 and 20 to 23.
__device__ __forceinline__ uint32_t WidenInt4(uint32_t codes) { return (codes & 0x00f000f0u) | 0x54005400u; }
constexpr float kInt4Bias = 64;

// Adds the products of a group of columns to `sums`, two by turns, which do not wait for each other. codes: the lane's
// first row of a stage; piece: its place in it.
template <Codes kCodes, int kFeatureTiles>
__device__ __forceinline__ void MultiplyGroup(uint32_t codes, int i, const uint4 (&x)[4], int c, int swizzle,
                                              float (&sums)[kFeatureTiles][2][4]) {
  const uint32_t(&right)[16] = reinterpret_cast<const uint32_t(&)[16]>(x);
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
    const uint32_t row = codes + 16 * f * kRowBytes;
    if constexpr (kCodes == Codes::kInt4) {
      const uint32_t at = ((4 * i + c) ^ swizzle) * 16;
      const uint4 low = LoadShared16(row + at), high = LoadShared16(row + 8 * kRowBytes + at);
      const uint32_t of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t first[4] = {WidenInt4(of_low[w] << 4), WidenInt4(of_high[w] << 4), WidenInt4(of_low[w]),
                                   WidenInt4(of_high[w])};
        const uint32_t second[4] = {WidenInt4(of_low[w] >> 4), WidenInt4(of_high[w] >> 4), WidenInt4(of_low[w] >> 8),
                                    WidenInt4(of_high[w] >> 8)};
        Mma16816Half(sums[f][0], first, right[4 * w], right[4 * w + 1]);
        Mma16816Half(sums[f][1], second, right[4 * w + 2], right[4 * w + 3]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = ((4 * half + c) ^ swizzle) * 16;
        const uint4 low = LoadShared16(row + at), high = LoadShared16(row + 8 * kRowBytes + at);
        const uint32_t of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint32_t left[4] = {WidenE4M3(of_low[q]), WidenE4M3(of_high[q]), WidenE4M3(of_low[q] >> 16),
                                    WidenE4M3(of_high[q] >> 16)};
          Mma16816Half(sums[f][q % 2], left, right[8 * half + 2 * q], right[8 * half + 2 * q + 1]);
        }
      }
    }
  }
}

// Adds the scaled products of group `i` of a chunk, the x group `group`, to `total`: features first_row, ... + 8 of
// each 16, rows 2 c and 2 c + 1. codes: the lane's first row of the stage.
template <Codes kCodes, int kFeatureTiles>
__device__ __forceinline__ void AddGroup(const Params& p, const ResidentX& x, const TileFactors& factors,
                                         uint32_t codes, int i, int group, int first_row,
                                         float (&total)[kFeatureTiles][4]) {
  const int lane = threadIdx.x % 32, c = lane % 4;
  const int x_row = min(lane / 4, p.num_rows - 1);  // the sums of rows that are not there are not stored
  uint4 right[4];
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) right[piece] = LoadShared16(x.Piece(group, x_row, piece, c));
  float sums[kFeatureTiles][2][4] = {};
  MultiplyGroup<kCodes, kFeatureTiles>(codes, i, right, c, first_row, sums);
  const float2 of_x = *reinterpret_cast<const float2*>(x.scales + group * kMaxRows + 2 * c);
  const float scale[2] = {of_x.x, of_x.y};
  float2 ones{};
  if constexpr (kCodes == Codes::kInt4) ones = *reinterpret_cast<const float2*>(x.sums + group * kMaxRows + 2 * c);
  const int scale_group = kCodes == Codes::kFp8 ? 0 : min(group / p.units_of_group, p.num_groups - 1);
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
    float of_group[2], zero[2];
#pragma unroll
    for (int k = 0; kCodes != Codes::kFp8 && k < 2; ++k) {
      const int feature = 16 * f + 8 * k + first_row;
      of_group[k] = factors.scales[feature * p.layout.scale_pitch + scale_group];
      if constexpr (kCodes == Codes::kInt4)
        zero[k] = kInt4Bias + static_cast<float>(factors.zeros[feature * p.num_groups + scale_group]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = sums[f][0][j] + sums[f][1][j];
      if constexpr (kCodes == Codes::kInt4) sum = fmaf(-zero[j / 2], j % 2 == 0 ? ones.x : ones.y, sum);
      if constexpr (kCodes != Codes::kFp8) sum *= of_group[j / 2];
      total[f][j] = fmaf(sum, scale[j % 2], total[f][j]);
    }
  }
}

// Adds the sums of the block's warps, in their order, and stores y. set: one of the two of Layout::sums.
template <Codes kCodes, int kFeatureTiles>
__device__ __forceinline__ void StoreTile(const Params& p, int tile, int first_row, float* set,
                                          const float (&total)[kFeatureTiles][4]) {
  constexpr int kFeatures = 16 * kFeatureTiles;
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4, rows = p.layout.sum_rows, size = p.layout.sums_of_warp;
  if (2 * c < rows) {
#pragma unroll
    for (int f = 0; f < 2 * kFeatureTiles; ++f) {
      *reinterpret_cast<float2*>(set + warp * size + (8 * f + first_row) * rows + 2 * c) =
          float2{total[f / 2][f % 2 * 2], total[f / 2][f % 2 * 2 + 1]};
    }
  }
  if constexpr (kCodes != Codes::kFp8) CpAsyncWaitAll();  // the factors of the next tile
  __syncthreads();  // a set is written again after all have passed the one of the next tile
  for (int i = threadIdx.x; i < kFeatures * p.num_rows; i += 32 * Warps(kCodes)) {
    const int in_tile = i % kFeatures, row = i / kFeatures;
    const int64_t feature = static_cast<int64_t>(tile) * kFeatures + in_tile;
    if (feature >= p.out) continue;
    const float* const from = set + in_tile * rows + row;
    float sum = from[0];
#pragma unroll
    for (int w = 1; w < Warps(kCodes); ++w) sum += from[w * size];
    StoreFp8Result(p, row, feature, kCodes == Codes::kFp8 ? __fmul_rn(sum, p.scales[feature]) : sum);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <Codes kCodes, int kFeatureTiles>
__global__ void __launch_bounds__(32 * Warps(kCodes), 1)
    Multiply(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap codes_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kWarps = Warps(kCodes), kFeatures = 16 * kFeatureTiles, kGroups = GroupsOfChunk(kCodes);
  using Ring = CodeRing<kFeatures, kWarps>;
  extern __shared__ char memory[];
  LetNextStart();
  const Layout& at = p.layout;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_row = FeatureOf(lane / 4);
  const int num_tiles = static_cast<int>((p.out + kFeatures - 1) / kFeatures);
  char* const smem = memory + (1024 - SmemAddress(memory) % 1024) % 1024;
  const auto factors = [&](int turn) {  // of this tile or of the next one
    return TileFactors{reinterpret_cast<float*>(smem + at.scales) + turn * kFeatures * at.scale_pitch,
                       reinterpret_cast<uint8_t*>(smem + at.zeros) + turn * kFeatures * p.num_groups};
  };
  Ring ring(p, codes_map, smem, num_tiles);
  if (lane == 0) ring.Begin();  // while the kernel in front may still be making x
  if constexpr (kCodes != Codes::kFp8) {
    CopyFactors<kCodes, kFeatures, 32 * kWarps>(p, blockIdx.x, factors(0));
    CpAsyncWaitAll();
    __syncthreads();
  }
  WaitForPrevious();
  const ResidentX x{SmemAddress(smem + at.x), reinterpret_cast<float*>(smem + at.x_scales),
                    reinterpret_cast<float*>(smem + at.x_sums), p.num_rows};
  constexpr ColumnOrder kOrder = kCodes == Codes::kInt4 ? ColumnOrder::kOwn : ColumnOrder::kArranged;
  ConvertRows<kOrder, kGroups, kWarps, kCodes == Codes::kInt4>(p.x, p.in, p.chunks, x);

  int stage = 0, turn = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, turn ^= 1) {
    const TileFactors now = factors(turn);
    float total[kFeatureTiles][4] = {};
    if (const int next = tile + static_cast<int>(gridDim.x); kCodes != Codes::kFp8 && next < num_tiles)
      CopyFactors<kCodes, kFeatures, 32 * kWarps>(p, next, factors(turn ^ 1));
#pragma unroll 1
    for (int chunk = warp; chunk < p.chunks; chunk += kWarps) {
      MbarrierWait(ring.full + 8 * stage, phase);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        AddGroup<kCodes, kFeatureTiles>(p, x, now, ring.codes + stage * Ring::kStage + first_row * kRowBytes, i,
                                        chunk * kGroups + i, first_row, total);
      }
      __syncwarp();  // every lane is done with the stage
      if (lane == 0) ring.Load(stage);
      if (++stage == at.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    float* const set = reinterpret_cast<float*>(smem + at.sums) + turn * kWarps * at.sums_of_warp;
    StoreTile<kCodes, kFeatureTiles>(p, tile, first_row, set, total);
  }
#endif
}

template <Codes kCodes>
Layout LayoutOf(int feature_tiles, int rows, int chunks, int scale_groups) {
  const int64_t groups = int64_t{chunks} * GroupsOfChunk(kCodes);
  return MakeLayout(kCodes, feature_tiles, (rows + 1) / 2 * 2,
                    {.x = 2 * groups * rows * kGroup, .scales = 4 * groups * kMaxRows, .sums = 4 * groups * kMaxRows},
                    scale_groups, 2);
}

template <Codes kCodes>
cudaError_t LaunchRows(Params p, int num_sms, cudaStream_t stream) {
  const int feature_tiles = ChooseFeatureTiles(p.out, num_sms, 2, [&](int n) {
    p.layout = LayoutOf<kCodes>(n, p.num_rows, p.chunks, p.num_groups);
    return p.layout.stages >= kMinStages;
  });
  if (feature_tiles == 2) return LaunchTiles(kCodes, Multiply<kCodes, 2>, 2, p, num_sms, stream);
  return feature_tiles == 1 ? LaunchTiles(kCodes, Multiply<kCodes, 1>, 1, p, num_sms, stream) : cudaErrorNotSupported;
}

template <Codes kCodes>
int RowsOfPass(int64_t in_features, int scale_groups, int64_t rows) {
  const int chunks = ChunksOf(kCodes, in_features);
  return RowsThatFit(std::min<int64_t>(rows, kMaxRows),
                     [&](int n) { return LayoutOf<kCodes>(1, n, chunks, scale_groups); });
}

template <Codes kCodes>
cudaError_t Run(Params p, int units_of_group, DType y_dtype, cudaStream_t stream) {
  p.chunks = ChunksOf(kCodes, p.in);
  p.units_of_group = units_of_group;
  return RunPasses(
      p, y_dtype, [&](int64_t rows) { return RowsOfPass<kCodes>(p.in, p.num_groups, rows); },
      [&](const Params& pass, int num_sms) { return LaunchRows<kCodes>(pass, num_sms, stream); });
}

}  // namespace

bool FitsSkinnyFp8GemmSm90(const Fp8GemmArgs& a) {
  const Fp8GemmParams p = ToFp8Params(a);
  return a.num_rows <= (a.scale_group == 0 ? RowsOfPass<Codes::kFp8>(p.in, p.num_groups, kMaxRows)
                                           : RowsOfPass<Codes::kFp8Groups>(p.in, p.num_groups, kMaxRows));
}
bool FitsSkinnyInt4GemmSm90(const Int4GemmArgs& a) {
  return a.num_rows <= RowsOfPass<Codes::kInt4>(a.in_features, ToCodesParams(a).num_groups, kMaxRows);
}

cudaError_t SkinnyFp8GemmSm90(const Fp8GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedFp8(a) || a.codes_are_new) return cudaErrorNotSupported;
  Params p{};
  static_cast<Fp8GemmParams&>(p) = ToFp8Params(a);
  return a.scale_group == 0 ? Run<Codes::kFp8>(p, 1, a.y_dtype, stream)
                            : Run<Codes::kFp8Groups>(p, 1, a.y_dtype, stream);
}

cudaError_t SkinnyInt4GemmSm90(const Int4GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedInt4(a) || a.scale_group % kGroup != 0) return cudaErrorNotSupported;
  Params p{};
  static_cast<Fp8GemmParams&>(p) = ToCodesParams(a);
  p.zeros = a.zeros;
  return Run<Codes::kInt4>(p, UnitsOfGroup(a.scale_group), a.y_dtype, stream);
}

}  // namespace spl::kernels::cuda
