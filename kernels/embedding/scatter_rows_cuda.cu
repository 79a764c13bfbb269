#include "kernels/cuda/cuda_types.h"
#include "kernels/embedding/scatter_rows_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// One block for each row of the result, which looks itself up: everything is written once.
__global__ void __launch_bounds__(kThreads)
    ScatterRowsKernel(const float* __restrict__ rows, const int32_t* __restrict__ ids, int32_t num_ids, int64_t width,
                      float* __restrict__ out) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  int32_t low = 0, high = num_ids;  // the first id at or past `row` lies in [low, high]
  while (low < high) {
    const int32_t mid = (low + high) / 2;
    if (ids[mid] < row) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  const bool chosen = low < num_ids && ids[low] == row;
  const float* from = rows + static_cast<int64_t>(low) * width;
  float* to = out + static_cast<int64_t>(row) * width;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * 4; c < width; c += kThreads * 4)
    Store4(to + c, chosen ? Load4(from + c) : float4{0, 0, 0, 0});
}

}  // namespace

cudaError_t ScatterRows(const ScatterRowsArgs& a, const int32_t* device_ids, cudaStream_t stream) {
  if (a.num_out_rows == 0) return cudaSuccess;
  ScatterRowsKernel<<<static_cast<unsigned>(a.num_out_rows), kThreads, 0, stream>>>(
      a.rows, device_ids, static_cast<int32_t>(a.ids.size()), a.width, a.out);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
