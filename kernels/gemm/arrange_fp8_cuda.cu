#include <algorithm>

#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/fp8_gemm_device.h"

namespace spl::kernels::cuda {
namespace {

__global__ void Arrange(uint4* blocks, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 from = blocks[i];
    blocks[i] = {ArrangedFp8Word(from.x, from.z), ArrangedFp8Word(from.x >> 16, from.z >> 16),
                 ArrangedFp8Word(from.y, from.w), ArrangedFp8Word(from.y >> 16, from.w >> 16)};
  }
}

}  // namespace

cudaError_t ArrangeFp8Codes(void* codes, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(codes) % 16 != 0) return cudaErrorInvalidValue;
  const int64_t blocks = bytes / 16;
  const auto grid = static_cast<unsigned>(std::min<int64_t>((blocks + 255) / 256, 65535));
  Arrange<<<grid, 256, 0, stream>>>(static_cast<uint4*>(codes), blocks);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
