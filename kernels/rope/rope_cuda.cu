#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;

struct Params {
  const float* cos;
  const float* sin;
  std::byte* pool;
  int64_t half_bytes;  // bytes of half a page: K, then V
  int32_t num_qo_heads, num_kv_heads, head_dim;
  RopeBatch batch;
  QkNorm norm;
};

// One warp for one head of one row: q heads are rotated in place, k heads rotated into their page, v heads copied. What
// the pass staged and the tables of angles are read before the wait for qkv.
template <typename T, typename Q, typename Kv>
__global__ void RopeKernel(T* qkv, Q* q_out, Params p) {
  LetNextStart();
  const int lane = threadIdx.x % 32;
  const int heads = p.num_qo_heads + 2 * p.num_kv_heads;
  const int head = blockIdx.y * kWarps + threadIdx.x / 32;
  const int row = blockIdx.x, d = p.head_dim, half = d / 2;
  if (head >= heads) return;
  const int position = p.batch.positions[row];
  T* x = qkv + (static_cast<int64_t>(row) * heads + head) * d;
  Kv* to = nullptr;
  bool is_v = false, no_page = false;
  if (head >= p.num_qo_heads) {
    is_v = head >= p.num_qo_heads + p.num_kv_heads;
    const int kv_head = head - p.num_qo_heads - (is_v ? p.num_kv_heads : 0);
    const int32_t page = p.batch.page_tables[p.batch.table_offset[p.batch.row_sequence[row]] +
                                             kv_head * p.batch.head_stride + position / kPageTokens];
    no_page = page < 0;
    to = reinterpret_cast<Kv*>(p.pool + (2 * static_cast<int64_t>(page) + (is_v ? 1 : 0)) * p.half_bytes) +
         position % kPageTokens * d;
  }
  const float* cos = p.cos + static_cast<int64_t>(position) * half;
  const float* sin = p.sin + static_cast<int64_t>(position) * half;
  const int first = min(lane, half - 1);
  const float first_cos = cos[first], first_sin = sin[first];
  WaitForPrevious();
  if (no_page) return;
  if (is_v) {
    for (int c = lane; c < d; c += 32) to[c] = FromF<Kv>(ToF(x[c]));
    return;
  }
  float scale = 1;
  const float* weight = head < p.num_qo_heads ? p.norm.q_weight : p.norm.k_weight;
  if (weight != nullptr) {
    float sum = 0;
    for (int c = lane; c < d; c += 32) sum += ToF(x[c]) * ToF(x[c]);
    scale = rsqrtf(WarpSum(sum) / static_cast<float>(d) + p.norm.eps);
  }
  for (int c = lane; c < half; c += 32) {
    float a = ToF(x[c]), b = ToF(x[c + half]);
    if (weight != nullptr) {
      a *= scale * weight[c];
      b *= scale * weight[c + half];
    }
    const float cos_c = c == lane ? first_cos : cos[c], sin_c = c == lane ? first_sin : sin[c];
    const float low = a * cos_c - b * sin_c, high = b * cos_c + a * sin_c;
    if (to != nullptr) {
      to[c] = FromF<Kv>(low);
      to[c + half] = FromF<Kv>(high);
    } else if (q_out != nullptr) {
      Q* q = q_out + (static_cast<int64_t>(row) * p.num_qo_heads + head) * d;
      q[c] = FromF<Q>(low);
      q[c + half] = FromF<Q>(high);
    } else {
      x[c] = FromF<T>(low);
      x[c + half] = FromF<T>(high);
    }
  }
}

template <typename T, typename Q, typename Kv>
cudaError_t Launch(const RopeWriteKvArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  const Params params{a.table.cos,    a.table.sin,    a.pool.base, static_cast<int64_t>(a.pool.half_bytes()),
                      a.num_qo_heads, a.num_kv_heads, a.head_dim,  batch,
                      a.qk_norm};
  const int heads = a.num_qo_heads + 2 * a.num_kv_heads;
  const dim3 grid(static_cast<unsigned>(batch.num_rows), static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  return LaunchEarly(RopeKernel<T, Q, Kv>, grid, kWarps * 32, 0, stream, static_cast<T*>(a.qkv.data),
                     static_cast<Q*>(a.q_out.data), params);
}

template <typename T, typename Q>
cudaError_t LaunchForPool(const RopeWriteKvArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  if (a.pool.dtype == DType::kF32) return Launch<T, Q, float>(a, batch, stream);
  if (a.pool.dtype == DType::kBF16) return Launch<T, Q, __nv_bfloat16>(a, batch, stream);
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t RopeWriteKv(const RopeWriteKvArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  if (batch.num_rows == 0) return cudaSuccess;
  const DType q_type = a.q_out.data == nullptr ? a.qkv.dtype : a.q_out.dtype;
  if (a.qkv.dtype == DType::kF32 && q_type == DType::kF32) return LaunchForPool<float, float>(a, batch, stream);
  if (a.qkv.dtype == DType::kF32 && q_type == DType::kBF16)
    return LaunchForPool<float, __nv_bfloat16>(a, batch, stream);
  if (a.qkv.dtype == DType::kBF16 && q_type == DType::kBF16)
    return LaunchForPool<__nv_bfloat16, __nv_bfloat16>(a, batch, stream);
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
