#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxDim = 256;
constexpr int kMaxPairs = kMaxDim / 64;  // of a lane, which has elements c and c + head_dim / 2 of each

struct E4M3 {};  // codes, and a scale for each row

struct Params {
  const float* cos;
  const float* sin;
  std::byte* pool;
  int64_t half_bytes;  // bytes of half a page: K, then V
  int32_t num_qo_heads, num_kv_heads, head_dim;
  RopeBatch batch;
  QkNorm norm;
};

// A row of K or V that is written as it comes, pair by pair.
template <typename Kv>
struct PageRow {
  Kv* values;

  __device__ __forceinline__ PageRow(std::byte* half_page, int slot, int d)
      : values(reinterpret_cast<Kv*>(half_page) + slot * d) {}
  // Pair i of this lane: elements c and c + half.
  __device__ __forceinline__ void Set(int, int c, int half, float low, float high) {
    values[c] = FromF<Kv>(low);
    values[c + half] = FromF<Kv>(high);
  }
  __device__ __forceinline__ void Finish(int) {}
};
// A row of codes, whose scale depends on all of it.
template <>
struct PageRow<E4M3> {
  uint8_t *codes, *scale;
  float low[kMaxPairs] = {}, high[kMaxPairs] = {};

  __device__ __forceinline__ PageRow(std::byte* half_page, int slot, int d)
      : codes(reinterpret_cast<uint8_t*>(half_page) + slot * d),
        scale(reinterpret_cast<uint8_t*>(half_page) + kPageTokens * d + slot) {}
  __device__ __forceinline__ void Set(int i, int, int, float x, float y) {
    low[i] = x;
    high[i] = y;
  }
  __device__ __forceinline__ void Finish(int half) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) largest = max(largest, max(Magnitude(low[i]), Magnitude(high[i])));
    const uint32_t row_scale = RowScaleOfBits(WarpLargest(largest));
    const float inverse = InverseRowScaleOf(row_scale);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = lane + 32 * i;
      if (c >= half) break;
      const uint32_t pair = E4M3Pair(low[i] * inverse, high[i] * inverse);
      codes[c] = static_cast<uint8_t>(pair);
      codes[c + half] = static_cast<uint8_t>(pair >> 8);
    }
    if (lane == 0) *scale = static_cast<uint8_t>(row_scale);
  }
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
  std::byte* to = nullptr;  // half a page
  bool is_v = false, no_page = false;
  if (head >= p.num_qo_heads) {
    is_v = head >= p.num_qo_heads + p.num_kv_heads;
    const int kv_head = head - p.num_qo_heads - (is_v ? p.num_kv_heads : 0);
    const int32_t page = p.batch.page_tables[p.batch.table_offset[p.batch.row_sequence[row]] +
                                             kv_head * p.batch.head_stride + position / kPageTokens];
    no_page = page < 0;
    to = p.pool + (2 * static_cast<int64_t>(page) + (is_v ? 1 : 0)) * p.half_bytes;
  }
  const int64_t angle = p.batch.angles == nullptr ? position : p.batch.angles[row];
  const float* cos = p.cos + angle * half;
  const float* sin = p.sin + angle * half;
  const int first = min(lane, half - 1);
  const float first_cos = cos[first], first_sin = sin[first];
  WaitForPrevious();
  if (no_page) return;
  PageRow<Kv> written(to, position % kPageTokens, d);
  if (is_v) {
#pragma unroll
    for (int i = 0; i < kMaxPairs; ++i) {
      const int c = lane + 32 * i;
      if (c < half) written.Set(i, c, half, ToF(x[c]), ToF(x[c + half]));
    }
    written.Finish(half);
    return;
  }
  float scale = 1;
  const float* weight = head < p.num_qo_heads ? p.norm.q_weight : p.norm.k_weight;
  if (weight != nullptr) {
    float sum = 0;
    for (int c = lane; c < d; c += 32) sum += ToF(x[c]) * ToF(x[c]);
    scale = rsqrtf(WarpSum(sum) / static_cast<float>(d) + p.norm.eps);
  }
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int c = lane + 32 * i;
    if (c >= half) break;
    float a = ToF(x[c]), b = ToF(x[c + half]);
    if (weight != nullptr) {
      a *= scale * weight[c];
      b *= scale * weight[c + half];
    }
    const float cos_c = i == 0 ? first_cos : cos[c], sin_c = i == 0 ? first_sin : sin[c];
    const float low = a * cos_c - b * sin_c, high = b * cos_c + a * sin_c;
    if (to != nullptr) {
      written.Set(i, c, half, low, high);
    } else if (q_out != nullptr) {
      Q* q = q_out + (static_cast<int64_t>(row) * p.num_qo_heads + head) * d;
      q[c] = FromF<Q>(low);
      q[c + half] = FromF<Q>(high);
    } else {
      x[c] = FromF<T>(low);
      x[c + half] = FromF<T>(high);
    }
  }
  if (to != nullptr) written.Finish(half);
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
  if (a.pool.dtype == DType::kE4M3) return Launch<T, Q, E4M3>(a, batch, stream);
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
