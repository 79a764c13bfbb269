// Which int4 product runs: by the rows, the scale groups, and whether sums must have one order.
#include "kernels/gemm/int4_gemm_cuda.h"

#include <algorithm>

#include "kernels/gemm/fp8_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

// FP8 codes of a slice of features: small enough to stay in the L2 cache until they are multiplied.
constexpr int64_t kSliceBytes = int64_t{24} << 20;
constexpr int64_t kSliceStep = 256;  // features: two tiles of sm_90

cudaError_t ExpandedGemm(const Int4GemmArgs& a, bool one_order, cudaStream_t stream) {
  const int64_t bytes = std::min<int64_t>(kSliceBytes, static_cast<int64_t>(a.workspace_bytes));
  int64_t slice = bytes / a.in_features / kSliceStep * kSliceStep;
  if (slice == 0) slice = static_cast<int64_t>(a.workspace_bytes) / a.in_features / kSliceStep * kSliceStep;
  if (slice == 0) return cudaErrorInvalidValue;
  const int64_t groups = a.scale_group == 0 ? 1 : (a.in_features + a.scale_group - 1) / a.scale_group;
  for (int64_t first = 0; first < a.out_features; first += slice) {
    const int64_t count = std::min(slice, a.out_features - first);
    cudaError_t e = ExpandInt4Codes(a, first, count, a.workspace, stream);
    if (e != cudaSuccess) return e;
    const Fp8GemmArgs part{.x = a.x,
                           .codes = static_cast<const uint8_t*>(a.workspace),
                           .scales = a.scales + first * groups,
                           .scale_group = a.scale_group,
                           .bias = a.bias == nullptr ? nullptr : a.bias + first,
                           .y = static_cast<char*>(a.y) + first * static_cast<int64_t>(DTypeBytes(a.y_dtype)),
                           .y_dtype = a.y_dtype,
                           .num_rows = a.num_rows,
                           .out_features = count,
                           .in_features = a.in_features,
                           .y_stride = a.out_features,
                           .codes_are_new = true};
    // Only tiles of any device serve small groups. Few rows: SkinnyFp8Gemm would be launched early.
    const bool small_groups = a.scale_group != 0 && a.scale_group != kFp8Group;
    e = small_groups                                      ? TiledFp8GemmSm80(part, stream)
        : one_order || a.num_rows <= kMaxStreamedInt4Rows ? TiledFp8Gemm(part, stream)
                                                          : Fp8Gemm(part, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

// Half of the workspace holds rows of x whose columns are in the order of W's.
cudaError_t OrderedGemm(const Int4GemmArgs& a, bool one_order, cudaStream_t stream) {
  const int64_t row_bytes = 2 * a.in_features;
  const auto half = static_cast<int64_t>(a.workspace_bytes / 512 * 256);
  const int64_t rows = half / row_bytes;
  if (rows == 0) return cudaErrorInvalidValue;
  for (int64_t row = 0; row < a.num_rows; row += rows) {
    Int4GemmArgs part = a;
    part.num_rows = std::min(rows, a.num_rows - row);
    part.x = a.workspace;
    part.column_order = nullptr;
    part.y = static_cast<char*>(a.y) + row * a.out_features * static_cast<int64_t>(DTypeBytes(a.y_dtype));
    part.workspace = static_cast<char*>(a.workspace) + half;
    part.workspace_bytes = static_cast<size_t>(half);
    cudaError_t e = GatherColumns(static_cast<const char*>(a.x) + row * row_bytes, a.column_order, part.num_rows,
                                  a.in_features, a.workspace, stream);
    if (e == cudaSuccess) e = Int4Gemm(part, one_order, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t Int4Gemm(const Int4GemmArgs& a, bool one_order, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!IsInt4Served(a.in_features, a.scale_group)) return cudaErrorNotSupported;
  if (a.column_order != nullptr) return OrderedGemm(a, one_order, stream);
  if (!one_order && FitsInt4DigitsGemmSm90(a)) {
    const cudaError_t e = Int4DigitsGemmSm90(a, stream);
    if (e != cudaErrorNotSupported) return e;
  }
  if (!one_order && FitsSkinnyInt4GemmSm90(a)) {
    const cudaError_t e = SkinnyInt4GemmSm90(a, stream);
    if (e != cudaErrorNotSupported) return e;
  }
  return !one_order && a.num_rows <= kMaxStreamedInt4Rows ? SkinnyInt4Gemm(a, stream)
                                                          : ExpandedGemm(a, one_order, stream);
}

}  // namespace spl::kernels::cuda
