#include <type_traits>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/norm/norm_cuda.h"
#include "kernels/quantize/e4m3_row_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kMaxVectors = RowShape::kMaxVectors;
constexpr int kFewVectors = RowShape::kFewVectors;  // so few that the weight's fit beside the row's

// One block a row: the row is read once, summed, scaled and written. Short rows' weights are read before the wait for
// the row. Out: a pointer, or E4M3Tensor.
template <typename Delta, typename Out, int kVectors>
__global__ void RmsNormKernel(float* residual, const Delta* delta, const float* weight, Out out, int width, float eps) {
  __shared__ float scratch[32], max_scratch[32];
  LetNextStart();
  constexpr bool kWeightFirst = kVectors <= kFewVectors;
  float4 w[kVectors];
  const auto load_weight = [&](int v) {
    const int c = ColumnOf(v);
    if (c < width) w[v] = Load4(weight + c);
  };
  if constexpr (kWeightFirst) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_weight(v);
  }
  WaitForPrevious();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  float4 x[kVectors];
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = ColumnOf(v);
    if (c >= width) break;
    x[v] = Load4(residual + row + c);
    if (delta != nullptr) {
      const float4 d = Load4(delta + row + c);
      x[v] = {x[v].x + d.x, x[v].y + d.y, x[v].z + d.z, x[v].w + d.w};
      Store4(residual + row + c, x[v]);
    }
    sum += x[v].x * x[v].x + x[v].y * x[v].y + x[v].z * x[v].z + x[v].w * x[v].w;
  }
  const float scale = rsqrtf(BlockSum(sum, scratch) / static_cast<float>(width) + eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int c = ColumnOf(v);
    if (c >= width) break;
    if constexpr (!kWeightFirst) load_weight(v);
    x[v] = {x[v].x * scale * w[v].x, x[v].y * scale * w[v].y, x[v].z * scale * w[v].z, x[v].w * scale * w[v].w};
    if constexpr (!std::is_same_v<Out, E4M3Tensor>) Store4(out + row + c, x[v]);
  }
  if constexpr (std::is_same_v<Out, E4M3Tensor>) StoreE4M3Row<kVectors>(x, blockIdx.x, width, out, max_scratch);
}

template <typename Delta, typename Out>
cudaError_t Launch(const RmsNormArgs& a, Out out, cudaStream_t stream) {
  const RowShape shape(a.width);
  const auto kernel =
      shape.vectors == kFewVectors ? RmsNormKernel<Delta, Out, kFewVectors> : RmsNormKernel<Delta, Out, kMaxVectors>;
  return LaunchEarly(kernel, static_cast<unsigned>(a.num_rows), shape.threads, 0, stream, a.residual,
                     static_cast<const Delta*>(a.delta.data), a.weight, out, static_cast<int>(a.width), a.eps);
}

template <typename Delta>
cudaError_t LaunchOut(const RmsNormArgs& a, cudaStream_t stream) {
  if (a.out.dtype == DType::kF32) return Launch<Delta>(a, static_cast<float*>(a.out.data), stream);
  if (a.out.dtype == DType::kBF16) return Launch<Delta>(a, static_cast<__nv_bfloat16*>(a.out.data), stream);
  if (a.out.dtype == DType::kE4M3 && a.width % 16 == 0) return Launch<Delta>(a, E4M3Tensor(a.out, a.num_rows), stream);
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t RmsNorm(const RmsNormArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.width % 4 != 0 || a.width > kQuantizedRowMax) return cudaErrorNotSupported;
  if (a.delta.dtype == DType::kF32) return LaunchOut<float>(a, stream);
  if (a.delta.dtype == DType::kBF16) return LaunchOut<__nv_bfloat16>(a, stream);
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
