#include <algorithm>

#include "kernels/activation/activation_cuda.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/quantize/e4m3_row_cuda.h"

namespace spl::kernels::cuda {
namespace {

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + __expf(-x)); }

__device__ __forceinline__ float4 SiluMul4(float4 g, float4 u) {
  return {Silu(g.x) * u.x, Silu(g.y) * u.y, Silu(g.z) * u.z, Silu(g.w) * u.w};
}

template <typename In, typename Out>
__global__ void SiluMulKernel(const In* gate_up, Out* out, int64_t num_vectors, int width) {
  LetNextStart();
  WaitForPrevious();
  const int vectors_per_row = width / 4;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; v < num_vectors;
       v += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = v / vectors_per_row;
    const int64_t c = (v - row * vectors_per_row) * 4;
    Store4(out + row * width + c,
           SiluMul4(Load4(gate_up + row * 2 * width + c), Load4(gate_up + row * 2 * width + width + c)));
  }
}

// One block a row.
template <typename In, int kVectors>
__global__ void SiluMulE4M3Kernel(const In* gate_up, const __grid_constant__ E4M3Tensor out, int width) {
  __shared__ float scratch[32];
  LetNextStart();
  WaitForPrevious();
  const In* const gate = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * width;
  float4 x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (const int c = ColumnOf(v); c < width) x[v] = SiluMul4(Load4(gate + c), Load4(gate + width + c));
  }
  StoreE4M3Row<kVectors>(x, blockIdx.x, width, out, scratch);
}

template <typename In>
cudaError_t LaunchE4M3(const SiluMulArgs& a, cudaStream_t stream) {
  const RowShape shape(a.width);
  const auto kernel = shape.vectors == RowShape::kFewVectors ? SiluMulE4M3Kernel<In, RowShape::kFewVectors>
                                                             : SiluMulE4M3Kernel<In, RowShape::kMaxVectors>;
  return LaunchEarly(kernel, static_cast<unsigned>(a.num_rows), shape.threads, 0, stream,
                     static_cast<const In*>(a.gate_up.data), E4M3Tensor(a.out, a.num_rows), static_cast<int>(a.width));
}

template <typename In, typename Out>
cudaError_t Launch(const SiluMulArgs& a, cudaStream_t stream) {
  const int64_t vectors = a.num_rows * (a.width / 4);
  const int64_t blocks = std::min<int64_t>((vectors + 255) / 256, 1 << 16);
  return LaunchEarly(SiluMulKernel<In, Out>, static_cast<unsigned>(blocks), 256, 0, stream,
                     static_cast<const In*>(a.gate_up.data), static_cast<Out*>(a.out.data), vectors,
                     static_cast<int>(a.width));
}

}  // namespace

cudaError_t SiluMul(const SiluMulArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.width % 4 != 0) return cudaErrorNotSupported;
  const DType in = a.gate_up.dtype, out = a.out.dtype;
  if (in == DType::kF32 && out == DType::kF32) return Launch<float, float>(a, stream);
  if (in == DType::kF32 && out == DType::kBF16) return Launch<float, __nv_bfloat16>(a, stream);
  if (in == DType::kBF16 && out == DType::kBF16) return Launch<__nv_bfloat16, __nv_bfloat16>(a, stream);
  if (out == DType::kE4M3 && a.width % 16 == 0 && a.width <= kQuantizedRowMax) {
    if (in == DType::kF32) return LaunchE4M3<float>(a, stream);
    if (in == DType::kBF16) return LaunchE4M3<__nv_bfloat16>(a, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
