// How the products of few rows are launched on Hopper: passes of as many rows as fit, and their blocks
// (skinny_codes_gemm_cuda_sm90.cu, skinny_int4_digits_gemm_cuda_sm90.cu). Included by .cu files only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/skinny_codes_sm90.h"

namespace spl::kernels::cuda {

// Chunks of a row of codes.
constexpr int ChunksOf(Codes codes, int64_t in_features) {
  const int64_t columns = int64_t{kGroup} * GroupsOfChunk(codes);
  return static_cast<int>((in_features + columns - 1) / columns);
}
// Groups of kGroup columns of a scale group of int4 codes.
constexpr int UnitsOfGroup(int64_t scale_group) {
  return scale_group == 0 ? std::numeric_limits<int>::max() : static_cast<int>(scale_group / kGroup);
}

// Rows of one pass over the weight, at most `rows`: 0 if not even one row fits. layout_of(n): the layout for n rows.
template <typename LayoutOf>
int RowsThatFit(int64_t rows, const LayoutOf& layout_of) {
  for (int n = static_cast<int>(rows); n > 0; --n) {
    if (layout_of(n).stages >= kMinStages) return n;
  }
  return 0;
}

// Launches passes over all rows of `all`. rows_of_pass(rows): as RowsThatFit; launch(p, num_sms): one pass.
template <typename RowsOfPass, typename Launch>
cudaError_t RunPasses(const Params& all, DType y_dtype, const RowsOfPass& rows_of_pass, const Launch& launch) {
  int num_sms = 0, capability = 0;
  if (DeviceInfo(&capability, &num_sms) != cudaSuccess || capability / 10 != 9) return cudaErrorNotSupported;
  cudaError_t e = cudaSuccess;
  for (int row = 0; row < all.num_rows && e == cudaSuccess;) {
    Params p = all;
    p.num_rows = rows_of_pass(all.num_rows - row);
    if (p.num_rows == 0) return cudaErrorNotSupported;
    p.x += static_cast<int64_t>(row) * p.in;
    p.y = static_cast<char*>(all.y) + row * p.y_stride * static_cast<int64_t>(DTypeBytes(y_dtype));
    row += p.num_rows;
    e = launch(p, num_sms);
  }
  return e;
}

// Launches `kernel` with tiles of feature_tiles x 16 features, a block for each SM that has one.
template <typename Kernel>
cudaError_t LaunchTiles(Codes codes, Kernel kernel, int feature_tiles, const Params& p, int num_sms,
                        cudaStream_t stream) {
  CUtensorMap map;
  const int64_t row_bytes = codes == Codes::kInt4 ? p.in / 2 : p.in;
  if (!EncodeMatrix(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.w, p.out, row_bytes, row_bytes, 16 * feature_tiles,
                    kRowBytes, CU_TENSOR_MAP_SWIZZLE_128B))
    return cudaErrorNotSupported;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.layout.bytes);
  if (e != cudaSuccess) return e;
  return LaunchEarly(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(NumTiles(p.out, feature_tiles), num_sms))),
                     dim3(32 * Warps(codes)), static_cast<size_t>(p.layout.bytes), stream, p, map);
}

}  // namespace spl::kernels::cuda
