#include "kernels/cuda/cuda_launch.h"
#include "kernels/quantize/e4m3_row_cuda.h"
#include "kernels/quantize/quantize_rows_cuda.h"

namespace spl::kernels::cuda {
namespace {

// One block a row.
template <typename T, int kVectors>
__global__ void QuantizeKernel(const T* x, const __grid_constant__ E4M3Tensor out, int width) {
  __shared__ float scratch[32];
  LetNextStart();
  WaitForPrevious();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  float4 values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (ColumnOf(v) < width) values[v] = Load4(x + row + ColumnOf(v));
  }
  StoreE4M3Row<kVectors>(values, blockIdx.x, width, out, scratch);
}

template <typename T>
cudaError_t Launch(const QuantizeRowsArgs& a, cudaStream_t stream) {
  const RowShape shape(a.width);
  const auto kernel = shape.vectors == RowShape::kFewVectors ? QuantizeKernel<T, RowShape::kFewVectors>
                                                             : QuantizeKernel<T, RowShape::kMaxVectors>;
  return LaunchEarly(kernel, static_cast<unsigned>(a.num_rows), shape.threads, 0, stream,
                     static_cast<const T*>(a.x.data), E4M3Tensor(a.out, a.num_rows), static_cast<int>(a.width));
}

}  // namespace

cudaError_t QuantizeRows(const QuantizeRowsArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.width % 16 != 0 || a.width > kQuantizedRowMax) return cudaErrorNotSupported;
  if (a.x.dtype == DType::kF32) return Launch<float>(a, stream);
  if (a.x.dtype == DType::kBF16) return Launch<__nv_bfloat16>(a, stream);
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
