// A lane has four pairs of a head: elements c to c + 3, and their partners half a head further. A head has the lanes of
// a power of two, so that a warp of heads of 128 works on two at a time. Each lane takes its part of several heads of
// one row: they share the row's angles, and their loads are all under way before the first of them is stored, which
// keeps memory busy.
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
#include "kernels/rope/rope_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kMaxWarps = 4;  // of a block
constexpr int kHeads = 2;     // of a lane: with four, 32 to 256 rows of Llama's took 15 to 30 % longer

struct E4M3 {};  // codes, and a scale for each row

struct Params {
  const float* cos;
  const float* sin;
  std::byte* pool;
  int64_t half_bytes;  // bytes of half a page: K, then V
  int32_t num_qo_heads, num_kv_heads, head_dim;
  int32_t lanes_log2;  // of a head
  RopeBatch batch;
  QkNorm norm;
};

struct Pairs {
  float4 low, high;
};

// A row that is read only here leaves the caches first, which then hold what is written: q is read next.
__device__ __forceinline__ float4 LoadOnce(const float* p) { return __ldcs(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ float4 LoadOnce(const __nv_bfloat16* p) { return Load4(p); }

__device__ __forceinline__ float2 Turned(float a, float b, float cos, float sin) {
  return {__fmaf_rn(a, cos, -__fmul_rn(b, sin)), __fmaf_rn(b, cos, __fmul_rn(a, sin))};
}
__device__ __forceinline__ Pairs Turned(const Pairs& x, float4 cos, float4 sin) {
  const float2 a = Turned(x.low.x, x.high.x, cos.x, sin.x), b = Turned(x.low.y, x.high.y, cos.y, sin.y);
  const float2 c = Turned(x.low.z, x.high.z, cos.z, sin.z), d = Turned(x.low.w, x.high.w, cos.w, sin.w);
  return {{a.x, b.x, c.x, d.x}, {a.y, b.y, c.y, d.y}};
}
__device__ __forceinline__ float4 Scaled(float4 x, float scale, float4 weight) {
  return {x.x * (scale * weight.x), x.y * (scale * weight.y), x.z * (scale * weight.z), x.w * (scale * weight.w)};
}

// 1 / RMS of the head at x, which the whole warp adds up, whatever part of it the lanes have: its loads find the head
// in the cache.
template <typename T>
__device__ __forceinline__ float InverseRms(const T* x, int d, float eps) {
  float sum = 0;
  for (int c = threadIdx.x % 32; c < d; c += 32) sum += ToF(x[c]) * ToF(x[c]);
  return rsqrtf(WarpSum(sum) / static_cast<float>(d) + eps);
}

// Writes a lane's pairs, from element c on, to row `slot` of half a page.
template <typename Kv>
struct PageRow {
  static __device__ __forceinline__ void Store(bool has, std::byte* half_page, int slot, int c, const Params& p,
                                               const Pairs& x) {
    if (!has) return;
    Kv* const row = reinterpret_cast<Kv*>(half_page) + slot * p.head_dim + c;
    Store4(row, x.low);
    Store4(row + p.head_dim / 2, x.high);
  }
};
// Codes, whose scale depends on all of the row: called by all lanes of the warp.
template <>
struct PageRow<E4M3> {
  static __device__ __forceinline__ uint32_t Largest(float4 x) {
    return max(max(Magnitude(x.x), Magnitude(x.y)), max(Magnitude(x.z), Magnitude(x.w)));
  }
  static __device__ __forceinline__ uint32_t Codes(float4 x, float inverse) {
    return E4M3Pair(x.x * inverse, x.y * inverse) | E4M3Pair(x.z * inverse, x.w * inverse) << 16;
  }
  static __device__ __forceinline__ void Store(bool has, std::byte* half_page, int slot, int c, const Params& p,
                                               const Pairs& x) {
    uint32_t largest = has ? max(Largest(x.low), Largest(x.high)) : 0;
    for (int offset = 1 << p.lanes_log2 >> 1; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (!has) return;
    const uint32_t scale = RowScaleOfBits(largest);
    const float inverse = InverseRowScaleOf(scale);
    std::byte* const row = half_page + slot * p.head_dim + c;
    *reinterpret_cast<uint32_t*>(row) = Codes(x.low, inverse);
    *reinterpret_cast<uint32_t*>(row + p.head_dim / 2) = Codes(x.high, inverse);
    if (c == 0) half_page[kPageTokens * p.head_dim + slot] = static_cast<std::byte>(scale);
  }
};

// One lane's part of a row.
template <typename T, typename Q, typename Kv>
struct RowPart {
  const Params& p;
  T* x;       // the row
  Q* q;       // the row of q_out, or null
  int first;  // head of the warp
  int c;      // first element, less than half if the lane has one
  int position;

  __device__ __forceinline__ int half() const { return p.head_dim / 2; }
  __device__ __forceinline__ int num_heads() const { return p.num_qo_heads + 2 * p.num_kv_heads; }
  __device__ __forceinline__ int HeadOf(int i) const {
    return first + (((i << 5) + static_cast<int>(threadIdx.x % 32)) >> p.lanes_log2);
  }
  // The last head of the warp's step i.
  __device__ __forceinline__ int LastOf(int i) const { return first + ((32 * i + 31) >> p.lanes_log2); }
  // Half of the page that head `head` of this row has; null if it has none.
  __device__ __forceinline__ std::byte* PageOf(int head, const int32_t* table) const {
    const int of_kv = head - p.num_qo_heads;
    if (of_kv < 0 || head >= num_heads()) return nullptr;
    const bool is_v = of_kv >= p.num_kv_heads;
    const int32_t page = table[(is_v ? of_kv - p.num_kv_heads : of_kv) * p.batch.head_stride + position / kPageTokens];
    return page < 0 ? nullptr : p.pool + (2 * static_cast<int64_t>(page) + (is_v ? 1 : 0)) * p.half_bytes;
  }
  // Norm of the lanes' heads of step i that are q or k.
  __device__ __forceinline__ void Normalise(int i, Pairs& v) const {
    const int own = HeadOf(i), in_step = 32 >> p.lanes_log2, begin = first + i * in_step;
    float scale = 1;
    for (int head = begin; head < min(begin + in_step, p.num_qo_heads + p.num_kv_heads); ++head) {
      const float of_head = InverseRms(x + head * p.head_dim, p.head_dim, p.norm.eps);
      if (head == own) scale = of_head;
    }
    if (c >= half() || own >= p.num_qo_heads + p.num_kv_heads) return;
    const float* const weight = own < p.num_qo_heads ? p.norm.q_weight : p.norm.k_weight;
    v.low = Scaled(v.low, scale, Load4(weight + c));
    v.high = Scaled(v.high, scale, Load4(weight + c + half()));
  }
  __device__ __forceinline__ void StoreQ(int head, const Pairs& v) const {
    const int at = head * p.head_dim + c;
    if (q != nullptr) {
      Store4(q + at, v.low);
      Store4(q + at + half(), v.high);
    } else {
      Store4(x + at, v.low);
      Store4(x + at + half(), v.high);
    }
  }
};

// Heads of q are rotated in place or into q_out, heads of k rotated into their page, heads of v copied. What the pass
// staged and the tables of angles are read before the wait for qkv.
template <typename T, typename Q, typename Kv>
__global__ void __launch_bounds__(kMaxWarps * 32) RopeKernel(T* qkv, Q* q_out, const Params p) {
  LetNextStart();
  const int warp = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) / 32, row = blockIdx.x;
  const int heads = p.num_qo_heads + 2 * p.num_kv_heads, half = p.head_dim / 2;
  const int first = warp * (kHeads * 32 >> p.lanes_log2);
  if (first >= heads) return;
  const RowPart<T, Q, Kv> part{
      p,
      qkv + static_cast<int64_t>(row) * heads * p.head_dim,
      q_out == nullptr ? nullptr : q_out + static_cast<int64_t>(row) * p.num_qo_heads * p.head_dim,
      first,
      4 * static_cast<int>(threadIdx.x % 32 & ((1u << p.lanes_log2) - 1)),
      p.batch.positions[row]};
  const int c = part.c;
  std::byte* to[kHeads];  // half a page
  const int32_t* const table = p.batch.page_tables + p.batch.table_offset[p.batch.row_sequence[row]];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) to[i] = part.PageOf(part.HeadOf(i), table);
  const int64_t angle =
      (p.batch.angles == nullptr ? part.position : p.batch.angles[row]) * int64_t{half} + min(c, half - 4);
  const float4 cos = Load4(p.cos + angle), sin = Load4(p.sin + angle);
  WaitForPrevious();
  Pairs v[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = part.HeadOf(i);
    if (c >= half || head >= heads) continue;
    const T* const x = part.x + head * p.head_dim + c;
    if (p.norm.q_weight != nullptr) {
      v[i] = {Load4(x), Load4(x + half)};
    } else {
      v[i] = {LoadOnce(x), LoadOnce(x + half)};
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = part.HeadOf(i);
    if (p.norm.q_weight != nullptr) part.Normalise(i, v[i]);
    if (head < p.num_qo_heads + p.num_kv_heads) v[i] = Turned(v[i], cos, sin);
    if (c < half && head < p.num_qo_heads) part.StoreQ(head, v[i]);
    if (part.LastOf(i) >= p.num_qo_heads)
      PageRow<Kv>::Store(c < half && to[i] != nullptr, to[i], part.position % kPageTokens, c, p, v[i]);
  }
}

template <typename T, typename Q, typename Kv>
cudaError_t Launch(const RopeWriteKvArgs& a, const RopeBatch& batch, cudaStream_t stream) {
  int lanes_log2 = 0;
  while (8 << lanes_log2 < a.head_dim) ++lanes_log2;
  const Params params{.cos = a.table.cos,
                      .sin = a.table.sin,
                      .pool = a.pool.base,
                      .half_bytes = static_cast<int64_t>(a.pool.half_bytes()),
                      .num_qo_heads = a.num_qo_heads,
                      .num_kv_heads = a.num_kv_heads,
                      .head_dim = a.head_dim,
                      .lanes_log2 = lanes_log2,
                      .batch = batch,
                      .norm = a.qk_norm};
  const int heads = a.num_qo_heads + 2 * a.num_kv_heads, of_warp = kHeads * 32 >> lanes_log2;
  const int warps = (heads + of_warp - 1) / of_warp, blocks = (warps + kMaxWarps - 1) / kMaxWarps;
  const dim3 grid(static_cast<unsigned>(batch.num_rows), static_cast<unsigned>(blocks));
  return LaunchEarly(RopeKernel<T, Q, Kv>, grid, static_cast<unsigned>((warps + blocks - 1) / blocks * 32), 0, stream,
                     static_cast<T*>(a.qkv.data), static_cast<Q*>(a.q_out.data), params);
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
