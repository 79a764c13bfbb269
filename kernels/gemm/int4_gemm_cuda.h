// y = x Wᵀ (+ bias) with an int4 weight on a device; x is bf16. The contract of values is gemm.h's: products of bf16
// with exact differences of code and zero point, f32 sums, each sum of a scale group (few rows: of at most 128 of its
// columns) times its scale.
//
//   Int4Gemm        few rows stream W (SkinnyInt4Gemm). For more, codes become those of FP8, in which code less zero
//                   point is exact, a slice of features at a time, and an FP8 product multiplies them
//                   (fp8_gemm_cuda.h). one_order: the latter for all numbers of rows, with sums that ascend over
//                   in_features, for deterministic work
//   SkinnyInt4Gemm  streams W once per 32 rows (fewer where a block has less shared memory)
//
// Shapes      x [num_rows, in_features], codes [out_features, in_features / 2], y [num_rows, out_features], contiguous;
//             x and codes 16-byte aligned, in_features a multiple of 32; y f32 or bf16; bias [out_features] or null
// Scales      scales and zeros [out_features, ceil(in_features / scale_group)], or [out_features] if scale_group is 0;
//             scale_group is 0, 32, 64 or a multiple of 128
// Ordering    SkinnyInt4Gemm is launched early (cuda_launch.h): W must not be written by a kernel that may still run.
//             The workspace belongs to the stream: calls on one stream may share one
// Errors      cudaErrorNotSupported: a shape, type or alignment not served; cudaErrorInvalidValue: the workspace is too
//             small; nothing was launched then
// Threads     thread-safe; asynchronous on `stream`; no allocation
// Cost        SkinnyInt4Gemm reads W once for each 32 rows. For more rows W is read once, and written and read as FP8
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels::cuda {

// True for the weights that are served.
constexpr bool IsInt4Served(int64_t in_features, int64_t scale_group) {
  return in_features % 32 == 0 && (scale_group == 32 || scale_group == 64 || scale_group % 128 == 0);
}

// Rearranges row-major codes in place, eight columns of a row at a time, so that a product widens them with few
// instructions: in each 32-bit word, column j goes to bits 16 (j % 2) + 4 (j / 2). codes: `bytes` of them, a multiple
// of 4, 4-byte aligned. Asynchronous on `stream`.
cudaError_t ArrangeInt4Codes(void* codes, int64_t bytes, cudaStream_t stream);

// Codes, arranged, and what belongs to them, in device memory.
class DeviceInt4Weight final : public LinearWeight {
 public:
  struct Parts {
    std::unique_ptr<Buffer> codes, scales, zeros;
    std::unique_ptr<Buffer> column_order;  // null: columns as they stand
  };
  DeviceInt4Weight(Parts parts, const WeightView& view)
      : LinearWeight(view.out_features, view.in_features), parts_(std::move(parts)), scale_group_(view.scale_group) {}
  const uint8_t* codes() const { return static_cast<const uint8_t*>(parts_.codes->data()); }
  const float* scales() const { return static_cast<const float*>(parts_.scales->data()); }
  const uint8_t* zeros() const { return static_cast<const uint8_t*>(parts_.zeros->data()); }
  const int32_t* column_order() const {
    return parts_.column_order == nullptr ? nullptr : static_cast<const int32_t*>(parts_.column_order->data());
  }
  int64_t scale_group() const { return scale_group_; }

 private:
  const Parts parts_;
  const int64_t scale_group_;
};

struct Int4GemmArgs {
  const void* x = nullptr;
  const uint8_t* codes = nullptr;  // arranged
  const float* scales = nullptr;
  const uint8_t* zeros = nullptr;
  int64_t scale_group = 0;
  const int32_t* column_order = nullptr;  // Int4Gemm: column k of W belongs to column column_order[k] of x; or null
  const float* bias = nullptr;
  void* y = nullptr;
  DType y_dtype = DType::kF32;
  int64_t num_rows = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
  void* workspace = nullptr;  // Int4Gemm: 256-byte aligned; kInt4WorkspaceBytes are enough for 45,000 columns
  size_t workspace_bytes = 0;
};

inline constexpr size_t kInt4WorkspaceBytes = size_t{64} << 20;
// Rows up to which Int4Gemm streams the weight, at most twice.
inline constexpr int64_t kMaxStreamedInt4Rows = 64;

cudaError_t Int4Gemm(const Int4GemmArgs& args, bool one_order, cudaStream_t stream);
cudaError_t SkinnyInt4Gemm(const Int4GemmArgs& args, cudaStream_t stream);
// The same on Hopper for up to eight rows a pass, fewer with many columns (as SkinnyFp8GemmSm90), and scale groups of
// 0 or a multiple of 128.
cudaError_t SkinnyInt4GemmSm90(const Int4GemmArgs& args, cudaStream_t stream);
bool FitsSkinnyInt4GemmSm90(const Int4GemmArgs& args);  // whether one pass is enough
// The same for up to two rows a pass, one with many columns, by products of bytes
// (skinny_int4_digits_gemm_cuda_sm90.cu): each 128 columns of x are rounded to 31 bits, their sums exact.
cudaError_t Int4DigitsGemmSm90(const Int4GemmArgs& args, cudaStream_t stream);
bool FitsInt4DigitsGemmSm90(const Int4GemmArgs& args);  // whether one pass is enough

// Writes rows [first, first + count) of W as FP8 codes of the value before scaling, arranged (ArrangeFp8Codes), to
// `out` [count, in_features]. Asynchronous on `stream`.
cudaError_t ExpandInt4Codes(const Int4GemmArgs& args, int64_t first, int64_t count, void* out, cudaStream_t stream);
// out[r, k] = x[r, column_order[k]] for `num_rows` rows from `x`, all bf16. Asynchronous on `stream`.
cudaError_t GatherColumns(const void* x, const int32_t* column_order, int64_t num_rows, int64_t in_features, void* out,
                          cudaStream_t stream);

}  // namespace spl::kernels::cuda
