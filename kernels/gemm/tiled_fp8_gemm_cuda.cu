// Many rows: a block makes 64 rows x 128 features, in steps of 32 columns through a ring of stages. Sums ascend over
// in_features, whatever else the call holds.
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kRows = 64, kFeatures = 128, kColumns = 32, kStages = 4, kThreads = 128;
constexpr int kXRow = kColumns * 2 + 16, kWRow = kColumns + 16;  // padded: eight rows lie in different banks
constexpr int kXBytes = kRows * kXRow, kStageBytes = kXBytes + kFeatures * kWRow;
static_assert(kScaleGroupStep == kColumns);

// The block's part of one step, from global to shared memory.
__device__ __forceinline__ void LoadStep(const Fp8GemmParams& p, int row0, int64_t feature0, int step, uint32_t stage) {
  const int at = step * kColumns;
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // x: four pieces of 16 bytes a row
    const int piece = threadIdx.x + i * kThreads, row = piece / 4, column = at + piece % 4 * 8;
    const bool valid = row0 + row < p.num_rows && column < p.in;
    CpAsync16(stage + static_cast<uint32_t>(row * kXRow + piece % 4 * 16),
              valid ? p.x + static_cast<int64_t>(row0 + row) * p.in + column : p.x, valid);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // codes: two
    const int piece = threadIdx.x + i * kThreads, row = piece / 2, column = at + piece % 2 * 16;
    const bool valid = feature0 + row < p.out && column < p.in;
    CpAsync16(stage + kXBytes + static_cast<uint32_t>(row * kWRow + piece % 2 * 16),
              valid ? p.w + (feature0 + row) * p.in + column : p.w, valid);
  }
}

// One warp's 64 rows x 32 features.
struct WarpSums {
  float of[4][4][4] = {};  // 16 rows, 8 features, the lane's elements

  __device__ __forceinline__ void Multiply(uint32_t stage, const char* codes, int warp, int lane) {
#pragma unroll
    for (int kk = 0; kk < kColumns; kk += 16) {
      uint32_t b[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const char* of_row = codes + (warp * 32 + j * 8 + lane / 4) * kWRow + kk + 4 * (lane % 4);
        WidenFp8Word(*reinterpret_cast<const uint32_t*>(of_row), b[j][0], b[j][1]);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint32_t a[4];
        LdMatrix4(a, stage + static_cast<uint32_t>((m * 16 + lane % 16) * kXRow + (kk + lane / 16 * 8) * 2));
#pragma unroll
        for (int j = 0; j < 4; ++j) Mma16816(of[m][j], a, b[j][0], b[j][1]);
      }
    }
  }
};

// totals += sums * scale of the group; sums begin again. `feature` is the lane's first one.
__device__ __forceinline__ void AddGroup(const Fp8GemmParams& p, int64_t feature, int group, WarpSums& sums,
                                         WarpSums& totals) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t at = feature + j * 8 + e;
      const float scale = at < p.out ? __ldg(p.scales + at * p.num_groups + group) : 0.0f;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        totals.of[m][j][e] = fmaf(sums.of[m][j][e], scale, totals.of[m][j][e]);
        totals.of[m][j][2 + e] = fmaf(sums.of[m][j][2 + e], scale, totals.of[m][j][2 + e]);
        sums.of[m][j][e] = sums.of[m][j][2 + e] = 0;
      }
    }
  }
}

// steps_of_group: steps that a scale group has, unless it is the whole row.
__global__ void __launch_bounds__(kThreads) TiledKernel(const __grid_constant__ Fp8GemmParams p, int steps_of_group) {
  extern __shared__ __align__(128) char smem[];
  const int64_t feature0 = static_cast<int64_t>(blockIdx.x) * kFeatures;
  const int row0 = static_cast<int>(blockIdx.y) * kRows, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t feature = feature0 + warp * 32 + lane % 4 * 2;
  const uint32_t base = SmemAddress(smem);
  const int num_steps = static_cast<int>((p.in + kColumns - 1) / kColumns);
  const auto load = [&](int step) {
    if (step < num_steps) LoadStep(p, row0, feature0, step, base + static_cast<uint32_t>(step % kStages * kStageBytes));
    CpAsyncCommit();
  };
  WarpSums sums, totals;
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < num_steps; ++step) {
    CpAsyncWait<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    const int stage = step % kStages * kStageBytes;
    sums.Multiply(base + static_cast<uint32_t>(stage), smem + stage + kXBytes, warp, lane);
    const bool group_ends = step + 1 == num_steps || (p.num_groups > 1 && (step + 1) % steps_of_group == 0);
    if (group_ends) AddGroup(p, feature, p.num_groups > 1 ? step / steps_of_group : 0, sums, totals);
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + m * 16 + lane / 4 + i / 2 * 8;
        const int64_t at = feature + j * 8 + i % 2;
        if (row < p.num_rows && at < p.out) StoreFp8Result(p, row, at, totals.of[m][j][i]);
      }
    }
  }
  CpAsyncWait<0>();
}

}  // namespace

cudaError_t TiledFp8GemmSm80(const Fp8GemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedFp8(a, /*small_groups=*/true)) return cudaErrorNotSupported;
  constexpr int kSmem = kStages * kStageBytes;
  const cudaError_t e = cudaFuncSetAttribute(TiledKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>((a.out_features + kFeatures - 1) / kFeatures),
                  static_cast<unsigned>((a.num_rows + kRows - 1) / kRows));
  TiledKernel<<<grid, kThreads, kSmem, stream>>>(ToFp8Params(a), static_cast<int>(a.scale_group / kColumns));
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
