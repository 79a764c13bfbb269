// Int4 codes are widened and rows of x are put in order in front of a product: see int4_gemm_cuda.h.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/common/e4m3.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/int4_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

unsigned Blocks(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65535));
}

__global__ void Arrange(uint32_t* words, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t from = words[i];
    uint32_t to = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) to |= (from >> (4 * j) & 15) << (16 * (j % 2) + 4 * (j / 2));
    words[i] = to;
  }
}

// FP8 codes of -16 to 15, by the value plus 16.
struct Codes {
  uint8_t of[32];
};

// A thread makes 16 columns of a row.
__global__ void Expand(const uint2* codes, const uint8_t* zeros, int64_t num_rows, int64_t pieces, int64_t group,
                       int64_t groups, const __grid_constant__ Codes table, uint4* out) {
  __shared__ uint8_t e4m3[32];
  if (threadIdx.x < 32) e4m3[threadIdx.x] = table.of[threadIdx.x];
  __syncthreads();
  const int64_t count = num_rows * pieces;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / pieces, column = i % pieces * 16;
    const uint32_t offset = 16u - zeros[row * groups + (group == 0 ? 0 : column / group)];
    const uint2 from = codes[i];
    const auto code = [&](uint32_t word, int j) {
      return uint32_t{e4m3[(word >> (16 * (j % 2) + 4 * (j / 2)) & 15) + offset]};
    };
    uint32_t to[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      to[q] = ArrangedFp8Word(code(from.x, 2 * q) | code(from.x, 2 * q + 1) << 8,
                              code(from.y, 2 * q) | code(from.y, 2 * q + 1) << 8);
    }
    out[i] = {to[0], to[1], to[2], to[3]};
  }
}

__global__ void Gather(const __nv_bfloat16* x, const int32_t* order, int64_t in, __nv_bfloat16* out) {
  const int64_t row = blockIdx.y;
  for (int64_t k = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; k < in; k += int64_t{gridDim.x} * blockDim.x)
    out[row * in + k] = x[row * in + order[k]];
}

}  // namespace

cudaError_t ArrangeInt4Codes(void* codes, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (bytes % 4 != 0 || reinterpret_cast<uintptr_t>(codes) % 4 != 0) return cudaErrorInvalidValue;
  Arrange<<<Blocks(bytes / 4), kThreads, 0, stream>>>(static_cast<uint32_t*>(codes), bytes / 4);
  return cudaGetLastError();
}

cudaError_t ExpandInt4Codes(const Int4GemmArgs& a, int64_t first, int64_t count, void* out, cudaStream_t stream) {
  if (a.in_features % 16 != 0) return cudaErrorNotSupported;
  Codes table;
  for (int i = 0; i < 32; ++i) table.of[i] = FloatToE4M3(static_cast<float>(i - 16));
  const int64_t pieces = a.in_features / 16;
  const int64_t groups = a.scale_group == 0 ? 1 : (a.in_features + a.scale_group - 1) / a.scale_group;
  Expand<<<Blocks(count * pieces), kThreads, 0, stream>>>(
      reinterpret_cast<const uint2*>(a.codes + first * (a.in_features / 2)), a.zeros + first * groups, count, pieces,
      a.scale_group, groups, table, static_cast<uint4*>(out));
  return cudaGetLastError();
}

cudaError_t GatherColumns(const void* x, const int32_t* column_order, int64_t num_rows, int64_t in_features, void* out,
                          cudaStream_t stream) {
  for (int64_t row = 0; row < num_rows; row += 65535) {
    const dim3 grid(Blocks(in_features), static_cast<unsigned>(std::min<int64_t>(65535, num_rows - row)));
    Gather<<<grid, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(x) + row * in_features, column_order,
                                          in_features, static_cast<__nv_bfloat16*>(out) + row * in_features);
    if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace spl::kernels::cuda
