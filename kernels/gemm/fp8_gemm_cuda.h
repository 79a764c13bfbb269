// y = x Wᵀ (+ bias) with an FP8 weight on a device; x is bf16. The contract of values is gemm.h's: products of bf16
// with exact codes, f32 sums, each sum of a scale group times its scale.
//
// Two kernels. SkinnyFp8Gemm is for few rows and streams W once per kMaxSkinnyRows of them (skinny_gemm_cuda.h), or per
// 8 or 16 where a block has less shared memory. TiledFp8Gemm is for many, and for deterministic work: its order of sums
// depends on in_features alone.
//
// Shapes      x [num_rows, in_features], codes [out_features, in_features], y [num_rows, out_features], contiguous; x
//             and codes 16-byte aligned, in_features a multiple of 16; y f32 or bf16; bias [out_features] or null
// Scales      [out_features, ceil(in_features / scale_group)], or [out_features] if scale_group is 0; scale_group is 0
//             or kFp8Group
// Ordering    SkinnyFp8Gemm is launched early (cuda_launch.h): W must not be written by a kernel that may still run
// Errors      cudaErrorNotSupported: a shape, type or alignment not served; nothing was launched then
// Threads     thread-safe; asynchronous on `stream`; no allocation, no workspace
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels::cuda {

inline constexpr int kFp8Group = 128;  // columns of a scale group, where it is not the whole row

// Row-major codes and scales in device memory.
class DeviceFp8Weight final : public LinearWeight {
 public:
  DeviceFp8Weight(std::unique_ptr<Buffer> codes, std::unique_ptr<Buffer> scales, const WeightView& view)
      : LinearWeight(view.out_features, view.in_features),
        codes_(std::move(codes)),
        scales_(std::move(scales)),
        scale_group_(view.scale_group) {}
  const uint8_t* codes() const { return static_cast<const uint8_t*>(codes_->data()); }
  const float* scales() const { return static_cast<const float*>(scales_->data()); }
  int64_t scale_group() const { return scale_group_; }

 private:
  const std::unique_ptr<Buffer> codes_, scales_;
  const int64_t scale_group_;
};

struct Fp8GemmArgs {
  const void* x = nullptr;
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
  int64_t scale_group = 0;
  const float* bias = nullptr;
  void* y = nullptr;
  DType y_dtype = DType::kF32;
  int64_t num_rows = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
};

cudaError_t SkinnyFp8Gemm(const Fp8GemmArgs& args, cudaStream_t stream);
cudaError_t TiledFp8Gemm(const Fp8GemmArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
