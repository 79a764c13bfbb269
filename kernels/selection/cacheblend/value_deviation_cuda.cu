#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/selection/cacheblend/value_deviation_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 128;

// Element c of row `slot` of half a page.
template <typename Kv>
__device__ __forceinline__ float ElementOf(const std::byte* half, int slot, int c, int d) {
  return ToF(reinterpret_cast<const Kv*>(half)[slot * d + c]);
}
template <>
__device__ __forceinline__ float ElementOf<uint8_t>(const std::byte* half, int slot, int c, int d) {
  const auto* codes = reinterpret_cast<const uint8_t*>(half);
  return E4M3Float(codes[slot * d + c]) * RowScaleFloat(codes[kPageTokens * d + slot]);
}

template <typename Kv>
__global__ void __launch_bounds__(kThreads)
    ValueDeviationKernel(const float* qkv, int64_t row_stride, int32_t v_offset, int32_t num_kv_heads, int32_t head_dim,
                         const std::byte* pool, int64_t half_bytes, RopeBatch batch, int32_t row_begin, float* scores) {
  __shared__ float scratch[32];
  const int row = row_begin + static_cast<int>(blockIdx.x), position = batch.positions[row];
  const float* v = qkv + row * row_stride + v_offset;
  const int32_t* table = batch.page_tables + batch.table_offset[batch.row_sequence[row]] + position / kPageTokens;
  float sum = 0;
  for (int i = threadIdx.x; i < num_kv_heads * head_dim; i += kThreads) {
    const int64_t page = table[i / head_dim * batch.head_stride];
    if (page < 0) continue;
    const float d =
        v[i] - ElementOf<Kv>(pool + (2 * page + 1) * half_bytes, position % kPageTokens, i % head_dim, head_dim);
    sum += d * d;
  }
  sum = BlockSum(sum, scratch);
  if (threadIdx.x == 0) scores[blockIdx.x] = sum;
}

template <typename Kv>
cudaError_t Launch(const ValueDeviationArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(a.rows.row_end - a.rows.row_begin);
  const int64_t stride = static_cast<int64_t>(a.num_qo_heads + 2 * a.num_kv_heads) * a.head_dim;
  ValueDeviationKernel<Kv><<<rows, kThreads, 0, stream>>>(
      static_cast<const float*>(a.qkv.data), stride, (a.num_qo_heads + a.num_kv_heads) * a.head_dim, a.num_kv_heads,
      a.head_dim, a.pool.base, static_cast<int64_t>(a.pool.half_bytes()), batch, a.rows.row_begin, a.scores);
  return cudaGetLastError();
}

}  // namespace

cudaError_t ValueDeviation(const ValueDeviationArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  if (a.rows.row_end == a.rows.row_begin) return cudaSuccess;
  if (a.qkv.dtype != DType::kF32) return cudaErrorNotSupported;
  if (a.pool.dtype == DType::kF32) return Launch<float>(a, batch, stream);
  if (a.pool.dtype == DType::kE4M3) return Launch<uint8_t>(a, batch, stream);
  return Launch<__nv_bfloat16>(a, batch, stream);
}

}  // namespace spl::kernels::cuda
