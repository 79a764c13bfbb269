// y = x Wᵀ (+ bias) for few rows on a device: the products of a decode step, which take as long as reading W once.
//
// Shapes      x [num_rows, in_features], w [out_features, in_features], y [num_rows, out_features], contiguous; x and w
//             bf16, 16-byte aligned, in_features a multiple of 8; y f32 or bf16; bias [out_features] or null
// Numerics    bf16 products, f32 sums. The order of an element's sum depends on in_features alone: not on num_rows, the
//             other rows or the timing, so that rows are bitwise independent over all that is served
// Ordering    launched early (cuda_launch.h): W must not be written by a kernel that may still run
// Errors      cudaErrorNotSupported: a shape, type or alignment not served; nothing was launched then
// Threads     thread-safe; asynchronous on `stream`; no allocation, no workspace
// Cost        W is read once; x once per block (up to 4 rows, in_features up to 4096), else once per 16 to 48 features
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels::cuda {

inline constexpr int64_t kMaxSkinnyRows = 32;

struct SkinnyGemmArgs {
  const void* x = nullptr;
  const void* w = nullptr;
  const float* bias = nullptr;
  void* y = nullptr;
  DType y_dtype = DType::kF32;
  int64_t num_rows = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
};

cudaError_t SkinnyGemm(const SkinnyGemmArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
