#include "kernels/cuda/cuda_types.h"
#include "kernels/norm/row_norms_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) RowNormsKernel(const T* __restrict__ x, int64_t width, float* out) {
  __shared__ float scratch[32];
  const T* row = x + static_cast<int64_t>(blockIdx.x) * width;
  float sum = 0;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * 4; c < width; c += kThreads * 4) {
    const float4 v = Load4(row + c);
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = sqrtf(sum);
}

}  // namespace

cudaError_t RowNorms(const RowNormsArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  const auto rows = static_cast<unsigned>(a.num_rows);
  if (a.x.dtype == DType::kF32) {
    RowNormsKernel<<<rows, kThreads, 0, stream>>>(static_cast<const float*>(a.x.data), a.width, a.out);
  } else if (a.x.dtype == DType::kBF16) {
    RowNormsKernel<<<rows, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(a.x.data), a.width, a.out);
  } else {
    return cudaErrorNotSupported;
  }
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
