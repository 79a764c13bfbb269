#include "kernels/cuda/cuda_types.h"
#include "kernels/kv_copy/fuse_rows_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ double SumOfLanes(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

struct Params {
  std::byte* pool;
  int64_t half_elements;
  RopeBatch batch;
  const int32_t* row_ids;
  void* saved;
  int32_t row_begin, num_pieces, num_kv_heads, head_dim;
};

// A warp for K or V of one token and KV head.
template <typename T, FuseStep kStep>
__global__ void __launch_bounds__(32 * kWarps) FuseKernel(const __grid_constant__ Params p) {
  const int piece = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (piece >= p.num_pieces) return;
  const int half = piece % 2, head = piece / 2 % p.num_kv_heads;
  const int row = p.row_begin + p.row_ids[piece / 2 / p.num_kv_heads];
  const int position = p.batch.positions[row];
  const int64_t page = p.batch.page_tables[p.batch.table_offset[p.batch.row_sequence[row]] +
                                           head * p.batch.head_stride + position / kPageTokens];
  if (page < 0) return;
  T* const now = reinterpret_cast<T*>(p.pool) + (2 * page + half) * p.half_elements +
                 static_cast<int64_t>(position % kPageTokens) * p.head_dim;
  T* const saved = static_cast<T*>(p.saved) + static_cast<int64_t>(piece) * p.head_dim;
  if constexpr (kStep == FuseStep::kSave) {
    for (int c = lane; c < p.head_dim; c += 32) saved[c] = now[c];
    return;
  }
  double dot = 0, of_new = 0, of_old = 0;
  bool equal = true;
  for (int c = lane; c < p.head_dim; c += 32) {
    const float x = ToF(now[c]), y = ToF(saved[c]);
    equal = equal && x == y;
    dot += double{x} * y;
    of_new += double{x} * x;
    of_old += double{y} * y;
  }
  if (__all_sync(0xffffffffu, equal)) return;
  dot = SumOfLanes(dot);
  const double norms = sqrt(SumOfLanes(of_new) * SumOfLanes(of_old));
  const double theta = norms > 0 ? dot / norms : 0;
  for (int c = lane; c < p.head_dim; c += 32)
    now[c] = FromF<T>(static_cast<float>(theta * ToF(now[c]) + (1 - theta) * ToF(saved[c])));
}

template <typename T>
cudaError_t Launch(const Params& p, FuseStep step, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.num_pieces + kWarps - 1) / kWarps);
  if (step == FuseStep::kSave) {
    FuseKernel<T, FuseStep::kSave><<<blocks, 32 * kWarps, 0, stream>>>(p);
  } else {
    FuseKernel<T, FuseStep::kBlend><<<blocks, 32 * kWarps, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t FuseRows(const FuseRowsArgs& a, const RopeBatch& batch, const int32_t* row_ids, cudaStream_t stream) {
  const int64_t pieces = static_cast<int64_t>(a.row_ids.size()) * a.num_kv_heads * 2;
  if (pieces == 0) return cudaSuccess;
  if (pieces > (1 << 30) || a.pool.dtype == DType::kF16) return cudaErrorNotSupported;
  const Params p{a.pool.base,
                 static_cast<int64_t>(a.pool.half_bytes() / DTypeBytes(a.pool.dtype)),
                 batch,
                 row_ids,
                 a.saved,
                 a.rows.row_begin,
                 static_cast<int32_t>(pieces),
                 a.num_kv_heads,
                 a.pool.head_dim};
  return a.pool.dtype == DType::kF32 ? Launch<float>(p, a.step, stream) : Launch<__nv_bfloat16>(p, a.step, stream);
}

}  // namespace spl::kernels::cuda
