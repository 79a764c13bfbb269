#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/listed_keys_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEmptyThreads = 128;

struct Params {
  GatherListedArgs args;
  int32_t row_bytes;  // bytes of K or V of one token; a multiple of 16
};

// One block for K or V of one page. All of its rows are looked up before the first is copied.
__global__ void __launch_bounds__(kThreads) GatherKernel(const __grid_constant__ Params p) {
  __shared__ int64_t source[kPageTokens];  // bytes from the pool's start; < 0: a slot past the end of the list
  const GatherListedArgs& a = p.args;
  const int page = static_cast<int>(blockIdx.x), head = a.heads.head[blockIdx.y], half = static_cast<int>(blockIdx.z);
  const int64_t half_bytes = int64_t{kPageTokens} * p.row_bytes;
  if (threadIdx.x < kPageTokens) {
    const int entry = page * kPageTokens + static_cast<int>(threadIdx.x);
    int64_t from = -1;
    if (entry < a.count) {
      const int32_t position = a.list[entry];
      const int32_t* table = a.batch.page_tables + a.batch.table_offset[0] + head * a.batch.head_stride;
      const int64_t physical = table[position / kPageTokens];
      if (physical >= 0) from = (2 * physical + half) * half_bytes + int64_t{position % kPageTokens} * p.row_bytes;
    }
    source[threadIdx.x] = from;
  }
  __syncthreads();
  const int chunks = p.row_bytes / 16;
  const auto* pool = reinterpret_cast<const char*>(a.batch.pool.base);
  auto* to = static_cast<char*>(a.pages) + (2 * (int64_t{blockIdx.y} * a.num_pages + page) + half) * half_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < kPageTokens * chunks; i += kThreads) {
    const int64_t from = source[i / chunks];
    uint4 x{0, 0, 0, 0};
    if (from >= 0) x = *reinterpret_cast<const uint4*>(pool + from + int64_t{i % chunks} * 16);
    *reinterpret_cast<uint4*>(to + int64_t{i} * 16) = x;
  }
}

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kEmptyThreads) EmptyKernel(const __grid_constant__ EmptyRowsArgs a) {
  const int64_t row = a.first_row + static_cast<int>(blockIdx.x);
  const int group = a.shape.num_qo_heads / a.shape.num_kv_heads, width = group * a.shape.head_dim;
  for (int n = 0; n < a.heads.count; ++n) {
    const int first = a.heads.head[n] * group;
    T* out = static_cast<T*>(a.out) + (row * a.shape.num_qo_heads + first) * a.shape.head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kEmptyThreads) out[i] = T(0.0f);
    if (a.lse != nullptr && static_cast<int>(threadIdx.x) < group)
      a.lse[row * a.shape.num_qo_heads + first + static_cast<int>(threadIdx.x)] = -INFINITY;
  }
}

}  // namespace

cudaError_t GatherListed(const GatherListedArgs& a, cudaStream_t stream) {
  if (a.heads.count < 0 || a.heads.count > kMaxKvHeads || a.count < 0 || a.num_pages < 0 ||
      int64_t{a.num_pages} * kPageTokens < a.count || a.batch.num_sequences != 1)
    return cudaErrorInvalidValue;
  if (a.heads.count == 0 || a.num_pages == 0) return cudaSuccess;
  const int32_t row_bytes = a.batch.pool.head_dim * static_cast<int32_t>(DTypeBytes(a.batch.pool.dtype));
  if (row_bytes < 16 || row_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(a.batch.pool.base) % 16 != 0)
    return cudaErrorNotSupported;
  if (a.pages == nullptr || reinterpret_cast<uintptr_t>(a.pages) % 16 != 0 || a.batch.page_tables == nullptr ||
      a.batch.table_offset == nullptr || (a.count > 0 && a.list == nullptr))
    return cudaErrorInvalidValue;
  GatherKernel<<<dim3(a.num_pages, a.heads.count, 2), kThreads, 0, stream>>>(Params{a, row_bytes});
  return cudaGetLastError();
}

cudaError_t WriteEmptyRows(const EmptyRowsArgs& a, cudaStream_t stream) {
  if (a.shape.num_kv_heads < 1 || a.shape.num_qo_heads % a.shape.num_kv_heads != 0 || a.heads.count < 0 ||
      a.heads.count > kMaxKvHeads || a.first_row < 0 || a.out == nullptr)
    return cudaErrorInvalidValue;
  if (a.shape.num_qo_heads / a.shape.num_kv_heads > kEmptyThreads || a.dtype == DType::kF16)
    return cudaErrorNotSupported;
  if (a.end_row <= a.first_row || a.heads.count == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(a.end_row - a.first_row));
  if (a.dtype == DType::kF32) {
    EmptyKernel<float><<<grid, kEmptyThreads, 0, stream>>>(a);
  } else {
    EmptyKernel<__nv_bfloat16><<<grid, kEmptyThreads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
