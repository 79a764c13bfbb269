#include <algorithm>

#include "kernels/cuda/cuda_types.h"
#include "kernels/gemm/gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

template <typename T>
__global__ void AddBiasKernel(T* y, const float* bias, int64_t count, int64_t width) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    y[i] = FromF<T>(ToF(y[i]) + bias[i % width]);
  }
}

template <typename T>
cudaError_t Launch(const LinearArgs& a, cudaStream_t stream) {
  const int64_t width = a.weight->out_features(), count = a.num_rows * width;
  const int64_t blocks = std::min<int64_t>((count + 255) / 256, 1 << 16);
  AddBiasKernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(static_cast<T*>(a.y.data), a.bias, count, width);
  return cudaGetLastError();
}

}  // namespace

cudaError_t AddBias(const LinearArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.y.dtype == DType::kF32) return Launch<float>(a, stream);
  if (a.y.dtype == DType::kBF16) return Launch<__nv_bfloat16>(a, stream);
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
