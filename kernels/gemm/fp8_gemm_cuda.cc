// Which FP8 product runs: by the device, the rows, and whether sums must have one order.
#include "kernels/gemm/fp8_gemm_cuda.h"

#include <algorithm>

#include "kernels/cuda/cuda_device_info.h"
#include "kernels/gemm/skinny_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

// Rows up to which a product streams the weight on devices without tiles of their own, at most twice.
constexpr int64_t kMaxStreamedRows = 2 * kMaxSkinnyRows;

// Times in ns, as measured on an H100 with the shapes of an 8B model (docs/results/2026-11-25-fp8-products.md).
struct TileCost {
  int rows, step, step_of_groups;  // a block's step of 64 columns, with scales of channels and of groups
};
constexpr TileCost kTiles[] = {{16, 235, 300}, {32, 240, 305}, {64, 275, 330}, {128, 330, 455}, {256, 585, 0}};
constexpr struct {
  int split, start;  // the time of a launch beside its steps
} kSplits[] = {{0, 2500}, {1, 3000}, {2, 5000}, {4, 5000}, {8, 8500}};

struct Choice {
  Fp8Tiling tiling;
  int64_t time = 0;
};

// The tiling that takes the least time. one_order: of those whose sums ascend over in_features.
Choice ChooseTiling(const Fp8GemmArgs& a, bool one_order, int num_sms) {
  const int64_t features = (a.out_features + kFp8TileFeatures - 1) / kFp8TileFeatures;
  const int64_t steps = (a.in_features + kFp8TileColumns - 1) / kFp8TileColumns;
  Choice best;
  for (const TileCost& tile : kTiles) {
    const int64_t cost = a.scale_group == 0 ? tile.step : tile.step_of_groups;
    if (cost == 0) continue;
    for (const auto& [split, start] : kSplits) {
      if (split == 0 ? tile.rows < 64 : one_order || tile.rows > 128) continue;
      const int64_t blocks = (a.num_rows + tile.rows - 1) / tile.rows * features * std::max(split, 1);
      // Clusters of four and eight leave some SMs unused.
      const int64_t sms = split > 2 ? num_sms * 7 / 8 : num_sms;
      const int64_t waves = (blocks + sms - 1) / sms, each = (steps + std::max(split, 1) - 1) / std::max(split, 1);
      // Without a split a block goes on to the next tile; otherwise another one starts.
      const int64_t time = waves * each * cost + (split == 0 ? 1 : waves) * start;
      if (best.time == 0 || time < best.time) best = {{tile.rows, split}, time};
    }
  }
  return best;
}

// The time of SkinnyFp8Gemm, and the least time of any product: bytes of the weight over a rate, in bytes per ns.
int64_t StreamTime(const Fp8GemmArgs& a) {
  const double rate = a.num_rows <= 8 ? 2750 : a.num_rows <= 16 ? 2500 : a.num_rows <= 24 ? 2200 : 2000;
  return 1500 + static_cast<int64_t>(static_cast<double>(a.out_features * a.in_features) / rate);
}
int64_t ReadTime(const Fp8GemmArgs& a) {
  return 3000 + static_cast<int64_t>(static_cast<double>(a.out_features * a.in_features) / 2700);
}

}  // namespace

cudaError_t TiledFp8Gemm(const Fp8GemmArgs& a, cudaStream_t stream) {
  int num_sms = 0, capability = 0;
  if (const cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  return capability / 10 == 9 ? TiledFp8GemmSm90(a, ChooseTiling(a, true, num_sms).tiling, stream)
                              : TiledFp8GemmSm80(a, stream);
}

cudaError_t Fp8Gemm(const Fp8GemmArgs& a, cudaStream_t stream) {
  int num_sms = 0, capability = 0;
  if (const cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  if (capability / 10 != 9)
    return a.num_rows <= kMaxStreamedRows ? SkinnyFp8Gemm(a, stream) : TiledFp8GemmSm80(a, stream);
  if (FitsSkinnyFp8GemmSm90(a)) {
    const cudaError_t e = SkinnyFp8GemmSm90(a, stream);
    if (e != cudaErrorNotSupported) return e;
  }
  const Choice tiles = ChooseTiling(a, false, num_sms);
  const bool few = a.num_rows <= kMaxSkinnyRows && StreamTime(a) <= std::max(tiles.time, ReadTime(a));
  return few ? SkinnyFp8Gemm(a, stream) : TiledFp8GemmSm90(a, tiles.tiling, stream);
}

}  // namespace spl::kernels::cuda
