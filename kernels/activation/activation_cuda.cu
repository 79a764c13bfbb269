#include <algorithm>

#include "kernels/activation/activation_cuda.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"

namespace spl::kernels::cuda {
namespace {

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + __expf(-x)); }

template <typename In, typename Out>
__global__ void SiluMulKernel(const In* gate_up, Out* out, int64_t num_vectors, int width) {
  LetNextStart();
  WaitForPrevious();
  const int vectors_per_row = width / 4;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; v < num_vectors;
       v += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = v / vectors_per_row;
    const int64_t c = (v - row * vectors_per_row) * 4;
    const float4 g = Load4(gate_up + row * 2 * width + c), u = Load4(gate_up + row * 2 * width + width + c);
    Store4(out + row * width + c, float4{Silu(g.x) * u.x, Silu(g.y) * u.y, Silu(g.z) * u.z, Silu(g.w) * u.w});
  }
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
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
