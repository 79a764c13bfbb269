#include "kernels/cuda/cuda_types.h"
#include "kernels/moe/expert_tile_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kTileRows = 64, kThreads = 128;

// f32: for exactness, not speed. A thread makes one column of every place of a tile.
__global__ void F32Kernel(const float* x, const int32_t* rows, const int32_t* offsets, const float* weights, float* y,
                          int num_experts, int n, int k) {
  const ExpertTile tile = FindExpertTile<kTileRows, kThreads>(offsets, num_experts, static_cast<int>(blockIdx.y));
  if (tile.expert < 0) return;
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= n) return;
  const float* w = weights + (static_cast<int64_t>(tile.expert) * n + column) * k;
  for (int place = tile.begin; place < tile.end; ++place) {
    const float* row = x + static_cast<int64_t>(rows == nullptr ? place : rows[place]) * k;
    float sum = 0;
    for (int i = 0; i < k; ++i) sum = fmaf(row[i], w[i], sum);
    y[static_cast<int64_t>(place) * n + column] = sum;
  }
}

template <typename T, typename Out>
__global__ void CombineKernel(const T* y, const int32_t* places, const float* weights, Out* out, int top_k, int width) {
  const int64_t row = blockIdx.x;
  for (int c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
    float4 sum{0, 0, 0, 0};
    for (int k = 0; k < top_k; ++k) {
      const float p = weights[row * top_k + k];
      const float4 v = Load4(y + static_cast<int64_t>(places[row * top_k + k]) * width + c);
      sum = {sum.x + p * v.x, sum.y + p * v.y, sum.z + p * v.z, sum.w + p * v.w};
    }
    Store4(out + row * width + c, sum);
  }
}

}  // namespace

cudaError_t GroupedLinear(const GroupedLinearArgs& a, cudaStream_t stream) {
  if (a.num_places == 0) return cudaSuccess;
  const auto& w = static_cast<const DeviceGroupedWeight&>(*a.weight);
  if (w.dtype() != DType::kF32) return TiledGroupedLinear(a, stream);
  const int n = static_cast<int>(w.out_features()), k = static_cast<int>(w.in_features());
  if (a.x.dtype != DType::kF32 || a.y.dtype != DType::kF32) return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>((n + kThreads - 1) / kThreads),
                  static_cast<unsigned>(MaxExpertTiles(a.num_places, w.num_experts(), kTileRows)));
  F32Kernel<<<grid, kThreads, 0, stream>>>(static_cast<const float*>(a.x.data), a.rows, a.offsets,
                                           static_cast<const float*>(w.data()), static_cast<float*>(a.y.data),
                                           w.num_experts(), n, k);
  return cudaGetLastError();
}

cudaError_t CombineExperts(const CombineExpertsArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.width % 4 != 0) return cudaErrorNotSupported;
  const unsigned rows = static_cast<unsigned>(a.num_rows);
  const int width = static_cast<int>(a.width);
  if (a.y.dtype == DType::kF32 && a.out.dtype == DType::kF32)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const float*>(a.y.data), a.places, a.weights,
                                            static_cast<float*>(a.out.data), a.top_k, width);
  else if (a.y.dtype == DType::kBF16 && a.out.dtype == DType::kF32)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(a.y.data), a.places, a.weights,
                                            static_cast<float*>(a.out.data), a.top_k, width);
  else if (a.y.dtype == DType::kBF16 && a.out.dtype == DType::kBF16)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(a.y.data), a.places, a.weights,
                                            static_cast<__nv_bfloat16*>(a.out.data), a.top_k, width);
  else
    return cudaErrorNotSupported;
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
