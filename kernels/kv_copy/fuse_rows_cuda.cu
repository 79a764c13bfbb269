#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
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
  int64_t half_bytes;
  RopeBatch batch;
  const int32_t* row_ids;
  void* saved;
  int32_t row_begin, num_pieces, num_kv_heads, head_dim;
};

// Rows of the pool and of `saved` as floats. A lane has elements l + 32 i; kMost of them at most.
constexpr int kMost = 256 / 32;

template <typename T>
struct Row {
  T* values;

  __device__ __forceinline__ static Row InPage(std::byte* half, int slot, int d) {
    return {reinterpret_cast<T*>(half) + slot * d};
  }
  __device__ __forceinline__ static Row Saved(void* saved, int64_t piece, int64_t, int d) {
    return {static_cast<T*>(saved) + piece * d};
  }
  __device__ __forceinline__ void CopyTo(const Row& to, int lane, int d) const {
    for (int c = lane; c < d; c += 32) to.values[c] = values[c];
  }
  __device__ __forceinline__ void Load(float (&x)[kMost], int lane, int d) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) x[i] = lane + 32 * i < d ? ToF(values[lane + 32 * i]) : 0.0f;
  }
  __device__ __forceinline__ void Store(const float (&x)[kMost], int lane, int d) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (lane + 32 * i < d) values[lane + 32 * i] = FromF<T>(x[i]);
    }
  }
};
// Codes and their scale; in `saved` the scales of all rows follow their codes.
struct E4M3 {};
template <>
struct Row<E4M3> {
  uint8_t *codes, *scale;

  __device__ __forceinline__ static Row InPage(std::byte* half, int slot, int d) {
    auto* bytes = reinterpret_cast<uint8_t*>(half);
    return {bytes + slot * d, bytes + kPageTokens * d + slot};
  }
  __device__ __forceinline__ static Row Saved(void* saved, int64_t piece, int64_t num_pieces, int d) {
    auto* bytes = static_cast<uint8_t*>(saved);
    return {bytes + piece * d, bytes + num_pieces * d + piece};
  }
  __device__ __forceinline__ void CopyTo(const Row& to, int lane, int d) const {
    for (int c = lane; c < d; c += 32) to.codes[c] = codes[c];
    if (lane == 0) *to.scale = *scale;
  }
  __device__ __forceinline__ void Load(float (&x)[kMost], int lane, int d) const {
    const float by = RowScaleFloat(*scale);
#pragma unroll
    for (int i = 0; i < kMost; ++i) x[i] = lane + 32 * i < d ? E4M3Float(codes[lane + 32 * i]) * by : 0.0f;
  }
  __device__ __forceinline__ void Store(const float (&x)[kMost], int lane, int d) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) largest = max(largest, Magnitude(x[i]));
    const uint32_t row_scale = RowScaleOfBits(WarpLargest(largest));
    const float by = InverseRowScaleOf(row_scale);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (lane + 32 * i < d) codes[lane + 32 * i] = static_cast<uint8_t>(E4M3Pair(x[i] * by, 0.0f));
    }
    if (lane == 0) *scale = static_cast<uint8_t>(row_scale);
  }
};

// A warp for K or V of one token and KV head.
template <typename T, FuseStep kStep>
__global__ void __launch_bounds__(32 * kWarps) FuseKernel(const __grid_constant__ Params p) {
  const int piece = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, d = p.head_dim;
  if (piece >= p.num_pieces) return;
  const int half = piece % 2, head = piece / 2 % p.num_kv_heads;
  const int row = p.row_begin + p.row_ids[piece / 2 / p.num_kv_heads];
  const int position = p.batch.positions[row];
  const int64_t page = p.batch.page_tables[p.batch.table_offset[p.batch.row_sequence[row]] +
                                           head * p.batch.head_stride + position / kPageTokens];
  if (page < 0) return;
  const auto now = Row<T>::InPage(p.pool + (2 * page + half) * p.half_bytes, position % kPageTokens, d);
  const auto saved = Row<T>::Saved(p.saved, piece, p.num_pieces, d);
  if constexpr (kStep == FuseStep::kSave) return now.CopyTo(saved, lane, d);
  float x[kMost], y[kMost];
  now.Load(x, lane, d);
  saved.Load(y, lane, d);
  double dot = 0, of_new = 0, of_old = 0;
  bool equal = true;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    equal = equal && x[i] == y[i];
    dot += double{x[i]} * y[i];
    of_new += double{x[i]} * x[i];
    of_old += double{y[i]} * y[i];
  }
  if (__all_sync(0xffffffffu, equal)) return;
  dot = SumOfLanes(dot);
  const double norms = sqrt(SumOfLanes(of_new) * SumOfLanes(of_old));
  const double theta = norms > 0 ? dot / norms : 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) x[i] = static_cast<float>(theta * x[i] + (1 - theta) * y[i]);
  now.Store(x, lane, d);
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
  if (pieces > (1 << 30) || a.pool.dtype == DType::kF16 || a.pool.head_dim > 256) return cudaErrorNotSupported;
  const Params p{a.pool.base,
                 static_cast<int64_t>(a.pool.half_bytes()),
                 batch,
                 row_ids,
                 a.saved,
                 a.rows.row_begin,
                 static_cast<int32_t>(pieces),
                 a.num_kv_heads,
                 a.pool.head_dim};
  if (a.pool.dtype == DType::kE4M3) return Launch<E4M3>(p, a.step, stream);
  return a.pool.dtype == DType::kF32 ? Launch<float>(p, a.step, stream) : Launch<__nv_bfloat16>(p, a.step, stream);
}

}  // namespace spl::kernels::cuda
