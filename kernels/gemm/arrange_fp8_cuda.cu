#include <algorithm>

#include "kernels/gemm/fp8_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

__device__ __forceinline__ uint32_t CodeAt(const uint4& block, int column) {
  const uint32_t words[4] = {block.x, block.y, block.z, block.w};
  return words[column / 4] >> (column % 4 * 8) & 0xff;
}

// Half of a word: one code as bf16 has it, the other around it.
__device__ __forceinline__ uint32_t Half(uint32_t code, uint32_t around) {
  return (code & 0x80) << 8 | (code & 0x7f) << 4 | (around & 0x80) << 4 | (around & 0x70) << 8 | (around & 0x0f);
}

__global__ void Arrange(uint4* blocks, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 from = blocks[i];
    uint32_t to[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      to[q] = Half(CodeAt(from, 2 * q), CodeAt(from, 2 * q + 8)) |
              Half(CodeAt(from, 2 * q + 1), CodeAt(from, 2 * q + 9)) << 16;
    }
    blocks[i] = {to[0], to[1], to[2], to[3]};
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
