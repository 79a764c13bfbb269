#include <algorithm>

#include "kernels/cuda/cuda_types.h"
#include "kernels/fill/fill_cuda.h"

namespace spl::kernels::cuda {
namespace {

template <typename T>
__global__ void FillKernel(FillRandomArgs a, float step) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    static_cast<T*>(a.out)[i] =
        static_cast<T>(step * static_cast<float>(RandomStep(a.stream, static_cast<uint64_t>(a.index(i)))));
  }
}

template <typename T>
__global__ void WidenKernel(const T* from, float* out, int64_t count) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = ToF(from[i]);
  }
}

unsigned Blocks(int64_t count) { return static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 1 << 14)); }

template <typename T>
cudaError_t Launch(const FillRandomArgs& a, cudaStream_t stream) {
  FillKernel<T><<<Blocks(a.count), 256, 0, stream>>>(a, ldexpf(1.0f, a.step_exponent));
  return cudaGetLastError();
}

}  // namespace

cudaError_t FillRandom(const FillRandomArgs& a, cudaStream_t stream) {
  if (a.count == 0) return cudaSuccess;
  switch (a.dtype) {
    case DType::kF32:
      return Launch<float>(a, stream);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(a, stream);
    case DType::kF16:
      return Launch<__half>(a, stream);
    case DType::kE4M3:
    case DType::kInt4:
      break;
  }
  return cudaErrorNotSupported;
}

cudaError_t Widen(const void* from, DType dtype, float* out, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (dtype == DType::kBF16)
    WidenKernel<<<Blocks(count), 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(from), out, count);
  else if (dtype == DType::kF16)
    WidenKernel<<<Blocks(count), 256, 0, stream>>>(static_cast<const __half*>(from), out, count);
  else
    return cudaErrorNotSupported;
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
