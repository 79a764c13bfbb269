// y = x Wᵀ (+ bias) with an FP8 weight on a device; x is bf16. The contract of values is gemm.h's: products of bf16
// with exact codes, f32 sums, each sum of a scale group times its scale.
//
//   Fp8Gemm        the fastest of the others for the shape and the device; the order of a sum depends on num_rows
//   TiledFp8Gemm   sums ascend over in_features, whatever num_rows is: for deterministic work
// Both choose between SkinnyFp8Gemm, which streams W once per kMaxSkinnyRows rows (skinny_gemm_cuda.h; per 8 or 16
// where a block has less shared memory), and tiles: of sm_90, and of any device from sm_80 on.
//
// Shapes      x [num_rows, in_features], codes [out_features, in_features], y [num_rows, out_features], contiguous; x
//             and codes 16-byte aligned, in_features a multiple of 16; y f32 or bf16; bias [out_features] or null. y
//             need not be contiguous: y_stride
// Scales      [out_features, ceil(in_features / scale_group)], or [out_features] if scale_group is 0; scale_group is 0
//             or kFp8Group; TiledFp8GemmSm80 serves any multiple of 32
// Ordering    SkinnyFp8Gemm, SkinnyFp8GemmSm90 and TiledFp8GemmSm90 are launched early (cuda_launch.h): W must not be written by a kernel
//             that may still run, unless codes_are_new
// Errors      cudaErrorNotSupported: a shape, type, alignment, tiling or device not served; nothing was launched then
// Threads     thread-safe; asynchronous on `stream`; no allocation, no workspace
// Cost        W is read once for each tile of rows, and widened in registers each time
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels::cuda {

inline constexpr int kFp8Group = 128;  // columns of a scale group, where it is not the whole row

// Puts row-major codes in another order, in place, 16 columns of a row at a time: a product then widens them with few
// instructions, and reads a thread's four with one load. Byte 4 q of such a block has column 2 q + 8, the next ones 2
// q, 2 q + 9 and 2 q + 1. Codes of activations stand in the same order (quantize/quantize_rows.h), so that products of
// codes with codes add the same pairs. codes: `bytes` of them, a multiple of 16, 16-byte aligned. Asynchronous on
// `stream`.
cudaError_t ArrangeFp8Codes(void* codes, int64_t bytes, cudaStream_t stream);

// Codes, arranged, and scales in device memory.
class DeviceFp8Weight final : public LinearWeight {
 public:
  // e4m3_scales: for products with x in e4m3 (gemm_cuda.h), if they are not `scales` themselves; null otherwise.
  // multiplies_e4m3: whether there are such products on this device.
  DeviceFp8Weight(std::unique_ptr<Buffer> codes, std::unique_ptr<Buffer> scales, std::unique_ptr<Buffer> e4m3_scales,
                  const WeightView& view, bool multiplies_e4m3)
      : LinearWeight(view.out_features, view.in_features),
        codes_(std::move(codes)),
        scales_(std::move(scales)),
        e4m3_scales_(std::move(e4m3_scales)),
        scale_group_(view.scale_group),
        multiplies_e4m3_(multiplies_e4m3) {}
  bool multiplies_e4m3() const { return multiplies_e4m3_; }
  // For fewer rows the products here are as fast, and do not round x.
  bool PrefersE4M3(int64_t num_rows) const override { return multiplies_e4m3_ && num_rows >= 192; }
  const uint8_t* codes() const { return static_cast<const uint8_t*>(codes_->data()); }
  const float* scales() const { return static_cast<const float*>(scales_->data()); }
  int64_t scale_group() const { return scale_group_; }
  int64_t e4m3_group() const override { return scale_group_; }
  const float* e4m3_scales() const {
    return static_cast<const float*>((e4m3_scales_ ? e4m3_scales_ : scales_)->data());
  }

 private:
  const std::unique_ptr<Buffer> codes_, scales_, e4m3_scales_;
  const int64_t scale_group_;
  const bool multiplies_e4m3_;
};

struct Fp8GemmArgs {
  const void* x = nullptr;
  const uint8_t* codes = nullptr;  // arranged
  const float* scales = nullptr;
  int64_t scale_group = 0;
  const float* bias = nullptr;
  void* y = nullptr;
  DType y_dtype = DType::kF32;
  int64_t num_rows = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t y_stride = 0;        // elements from one row of y to the next; 0: out_features
  bool codes_are_new = false;  // kernels in front write the codes: nothing is launched early
};

cudaError_t Fp8Gemm(const Fp8GemmArgs& args, cudaStream_t stream);
cudaError_t TiledFp8Gemm(const Fp8GemmArgs& args, cudaStream_t stream);

cudaError_t SkinnyFp8Gemm(const Fp8GemmArgs& args, cudaStream_t stream);
// The same on Hopper for up to eight rows a pass, fewer with many columns: those whose x fits into shared memory beside
// the codes on their way (skinny_codes_gemm_cuda_sm90.cu). Not for codes that are new.
cudaError_t SkinnyFp8GemmSm90(const Fp8GemmArgs& args, cudaStream_t stream);
bool FitsSkinnyFp8GemmSm90(const Fp8GemmArgs& args);  // whether one pass is enough
cudaError_t TiledFp8GemmSm80(const Fp8GemmArgs& args, cudaStream_t stream);

inline constexpr int kFp8TileFeatures = 128, kFp8TileColumns = 64;  // a tile of sm_90, and a step of it

// Rows of a tile, and blocks that share its columns (1, 2, 4 or 8); 0: none do, and sums ascend over in_features.
// Served: 64, 128 and, unless scales are of groups, 256 rows with split 0; 16 to 128 rows with the others.
struct Fp8Tiling {
  int rows = 0, split = 0;
};
cudaError_t TiledFp8GemmSm90(const Fp8GemmArgs& args, Fp8Tiling tiling, cudaStream_t stream);

}  // namespace spl::kernels::cuda
