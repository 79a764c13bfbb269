#include "kernels/selection/sparsex/pool_scores_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// A block's scores and those on both sides of them are read once.
__global__ void __launch_bounds__(kThreads)
    PoolScoresKernel(const float* __restrict__ scores, int64_t num_scores, int32_t radius, float* __restrict__ out) {
  __shared__ float tile[kThreads + 2 * kPoolRadiusMax];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads - radius;
  for (int i = static_cast<int>(threadIdx.x); i < kThreads + 2 * radius; i += kThreads) {
    const int64_t at = first + i;
    tile[i] = at >= 0 && at < num_scores ? scores[at] : -INFINITY;
  }
  __syncthreads();
  const int64_t index = first + radius + static_cast<int64_t>(threadIdx.x);
  if (index >= num_scores) return;
  float best = tile[threadIdx.x];
  for (int i = 1; i <= 2 * radius; ++i) best = fmaxf(best, tile[threadIdx.x + i]);
  out[index] = best;
}

}  // namespace

cudaError_t PoolScores(const PoolScoresArgs& a, cudaStream_t stream) {
  if (a.num_scores == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((a.num_scores + kThreads - 1) / kThreads);
  PoolScoresKernel<<<blocks, kThreads, 0, stream>>>(a.scores, a.num_scores, a.radius, a.out);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
