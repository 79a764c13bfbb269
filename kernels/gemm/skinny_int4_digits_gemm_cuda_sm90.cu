// One or two rows and a weight of int4 codes on Hopper. Tensor cores multiply bytes: a word of eight codes becomes two
// operands of four codes in three instructions, where f16 takes fourteen for two words, and x is digits of bytes
// (digit_x_sm90.h), which stand where other rows would. Sums of 128 columns are whole numbers, and exact.
//
// Blocks, warps and their rings are those of skinny_codes_gemm_cuda_sm90.cu. Sums of lanes c and c ^ 1, which hold two
// digits each of a row, meet at the end of a tile.
#include <algorithm>

#include "kernels/gemm/digit_x_sm90.h"
#include "kernels/gemm/int4_gemm_device.h"
#include "kernels/gemm/skinny_codes_launch_sm90.h"
#include "kernels/gemm/skinny_codes_ring_sm90.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kMaxDigitRows = 2;  // their digits fill an operand; for more the kernel in f16 is as fast
constexpr int kWarps = Warps(Codes::kInt4), kGroups = GroupsOfChunk(Codes::kInt4);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A whole number below 2^22, added to these bits, is the f32 number kMagic + it.
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912;

// c[16x8] += a[16x32] b[32x8], of unsigned and signed bytes.
__device__ __forceinline__ void MmaBytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds the scaled products of group `i` of a chunk, the x group `group`, to `total`: features first_row and + 8 of each
// 16, of the two digits of this lane. codes: the lane's first row of the stage.
template <int kFeatureTiles>
__device__ __forceinline__ void AddGroup(const Params& p, const DigitX& x, const TileFactors& factors, uint32_t codes,
                                         int i, int group, int first_row, float (&total)[kFeatureTiles][2]) {
  constexpr uint32_t kLowBits = 0x0f0f0f0f;
  const int lane = threadIdx.x % 32, c = lane % 4;
  // The sums of a row that is not there are not stored.
  const int line = min(lane / 4, x.lines() - 1), row = min(c / 2, x.rows - 1);
  const uint4 first = LoadShared16(x.Piece(group, line, 0, c)), second = LoadShared16(x.Piece(group, line, 1, c));
  const uint32_t right[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const int2 ones = *reinterpret_cast<const int2*>(x.sums + group * x.lines() + kDigits * row + c % 2 * 2);
  const float unit = x.scales[group * x.rows + row] * (c % 2 == 0 ? 1.0f : 65536.0f);
  const int scale_group =
      p.units_of_group == 1 ? min(group, p.num_groups - 1) : min(group / p.units_of_group, p.num_groups - 1);
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
    const uint32_t at = codes + 16 * f * kRowBytes + ((4 * i + c) ^ first_row) * 16;
    const uint4 low = LoadShared16(at), high = LoadShared16(at + 8 * kRowBytes);
    const uint32_t of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
    int32_t sums[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t left[4] = {of_low[w] & kLowBits, of_high[w] & kLowBits, of_low[w] >> 4 & kLowBits,
                                of_high[w] >> 4 & kLowBits};
      MmaBytes(sums, left, right[2 * w], right[2 * w + 1]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int feature = 16 * f + 8 * k + first_row;
      const float scale = factors.scales[feature * p.layout.scale_pitch + scale_group];
      const int zero = factors.zeros[feature * p.num_groups + scale_group];
      const float lower = __int_as_float(sums[2 * k] - zero * ones.x) - kMagic;
      const float upper = __int_as_float(sums[2 * k + 1] - zero * ones.y) - kMagic;
      total[f][k] = fmaf(fmaf(upper, 256.0f, lower) * scale, unit, total[f][k]);
    }
  }
}

// Adds the sums of the block's warps, in their order, and stores y. set: one of the two of Layout::sums.
template <int kFeatureTiles>
__device__ __forceinline__ void StoreTile(const Params& p, int tile, int first_row, float* set,
                                          const float (&total)[kFeatureTiles][2]) {
  constexpr int kFeatures = 16 * kFeatureTiles;
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4, rows = p.layout.sum_rows, size = p.layout.sums_of_warp;
#pragma unroll
  for (int f = 0; f < kFeatureTiles; ++f) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float sum = total[f][k] + __shfl_xor_sync(0xffffffffu, total[f][k], 1);
      if (c % 2 == 0) set[warp * size + (16 * f + 8 * k + first_row) * rows + c / 2] = sum;
    }
  }
  CpAsyncWaitAll();  // the factors of the next tile
  __syncthreads();   // a set is written again after all have passed the one of the next tile
  for (int i = threadIdx.x; i < kFeatures * p.num_rows; i += 32 * kWarps) {
    const int in_tile = i % kFeatures, row = i / kFeatures;
    const int64_t feature = static_cast<int64_t>(tile) * kFeatures + in_tile;
    if (feature >= p.out) continue;
    const float* const from = set + in_tile * rows + row;
    float sum = from[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += from[w * size];
    StoreFp8Result(p, row, feature, sum);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kFeatureTiles>
__global__ void __launch_bounds__(32 * kWarps, 1)
    MultiplyDigits(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap codes_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kFeatures = 16 * kFeatureTiles;
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
  CopyFactors<Codes::kInt4, kFeatures, 32 * kWarps>(p, blockIdx.x, factors(0));
  CpAsyncWaitAll();
  __syncthreads();
  WaitForPrevious();
  const DigitX x{SmemAddress(smem + at.x), reinterpret_cast<float*>(smem + at.x_scales),
                 reinterpret_cast<int32_t*>(smem + at.x_sums), p.num_rows};
  ConvertToDigits<kGroups, kWarps>(p.x, p.in, p.chunks, x);

  int stage = 0, turn = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, turn ^= 1) {
    const TileFactors now = factors(turn);
    float total[kFeatureTiles][2] = {};
    if (const int next = tile + static_cast<int>(gridDim.x); next < num_tiles)
      CopyFactors<Codes::kInt4, kFeatures, 32 * kWarps>(p, next, factors(turn ^ 1));
#pragma unroll 1
    for (int chunk = warp; chunk < p.chunks; chunk += kWarps) {
      MbarrierWait(ring.full + 8 * stage, phase);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        AddGroup<kFeatureTiles>(p, x, now, ring.codes + stage * Ring::kStage + first_row * kRowBytes, i,
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
    StoreTile<kFeatureTiles>(p, tile, first_row, set, total);
  }
#endif
}

Layout LayoutOf(int feature_tiles, int rows, int chunks, int scale_groups, int turns) {
  const int64_t groups = int64_t{chunks} * kGroups;
  return MakeLayout(
      Codes::kInt4, feature_tiles, (rows + 1) / 2 * 2,
      {.x = groups * rows * kDigits * kGroup, .scales = 4 * groups * rows, .sums = 4 * groups * rows * kDigits},
      scale_groups, turns);
}
int RowsOfPass(int64_t in_features, int scale_groups, int64_t rows) {
  const int chunks = ChunksOf(Codes::kInt4, in_features);
  return RowsThatFit(std::min<int64_t>(rows, kMaxDigitRows),
                     [&](int n) { return LayoutOf(1, n, chunks, scale_groups, 2); });
}

cudaError_t LaunchRows(Params p, int num_sms, cudaStream_t stream) {
  const int feature_tiles = ChooseFeatureTiles(p.out, num_sms, 3, [&](int n) {
    p.layout = LayoutOf(n, p.num_rows, p.chunks, p.num_groups, TilesOfBlock(p.out, n, num_sms) == 1 ? 1 : 2);
    return p.layout.stages >= kMinStages;
  });
  switch (feature_tiles) {
    case 3:
      return LaunchTiles(Codes::kInt4, MultiplyDigits<3>, 3, p, num_sms, stream);
    case 2:
      return LaunchTiles(Codes::kInt4, MultiplyDigits<2>, 2, p, num_sms, stream);
    case 1:
      return LaunchTiles(Codes::kInt4, MultiplyDigits<1>, 1, p, num_sms, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

bool FitsInt4DigitsGemmSm90(const Int4GemmArgs& a) {
  return a.num_rows <= RowsOfPass(a.in_features, ToCodesParams(a).num_groups, kMaxDigitRows);
}

cudaError_t Int4DigitsGemmSm90(const Int4GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedInt4(a) || a.scale_group % kGroup != 0) return cudaErrorNotSupported;
  Params p{};
  static_cast<Fp8GemmParams&>(p) = ToCodesParams(a);
  p.zeros = a.zeros;
  p.chunks = ChunksOf(Codes::kInt4, a.in_features);
  p.units_of_group = UnitsOfGroup(a.scale_group);
  return RunPasses(
      p, a.y_dtype, [&](int64_t rows) { return RowsOfPass(p.in, p.num_groups, rows); },
      [&](const Params& pass, int num_sms) { return LaunchRows(pass, num_sms, stream); });
}

}  // namespace spl::kernels::cuda
