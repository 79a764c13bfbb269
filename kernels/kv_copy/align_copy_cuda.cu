#include "kernels/cuda/cuda_types.h"
#include "kernels/kv_copy/align_copy_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // bf16 elements in 16 bytes

struct Params {
  std::byte* pool;
  int64_t half_bytes;
  int32_t num_streams, head_dim, rotary_dim;
  bool interleaved;
  AlignCopyTables tables;
};

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight elements of the low half of a head and the eight they pair with, turned.
__device__ __forceinline__ void Rotate8(uint4& low, uint4& high, const float* cos, const float* sin) {
  uint32_t* a = reinterpret_cast<uint32_t*>(&low);
  uint32_t* b = reinterpret_cast<uint32_t*>(&high);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&a[i]));
    const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&b[i]));
    const float c0 = cos[2 * i], c1 = cos[2 * i + 1], s0 = sin[2 * i], s1 = sin[2 * i + 1];
    a[i] = Pack(x.x * c0 - y.x * s0, x.y * c1 - y.y * s1);
    b[i] = Pack(y.x * c0 + x.x * s0, y.y * c1 + x.y * s1);
  }
}

// bf16, the whole head turned in halves of a multiple of eight: a thread keeps its eight angles for all tokens. One
// block for one run of one stream.
__global__ void __launch_bounds__(kThreads) AlignHalvesKernel(Params p) {
  const int run_idx = blockIdx.x / p.num_streams;
  const AlignRun run = p.tables.runs[run_idx];
  const int64_t src = p.tables.src_pages[blockIdx.x], dst = p.tables.dst_pages[blockIdx.x];
  const int half = p.head_dim / 2, threads_a_token = half / kVector;
  const int c = static_cast<int>(threadIdx.x) % threads_a_token * kVector;
  const int first = static_cast<int>(threadIdx.x) / threads_a_token, step = kThreads / threads_a_token;
  float cos[kVector], sin[kVector];
  if (run.rotation >= 0) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      cos[i] = p.tables.cos[static_cast<int64_t>(run.rotation) * half + c + i];
      sin[i] = p.tables.sin[static_cast<int64_t>(run.rotation) * half + c + i];
    }
  }
  const auto at = [&](int64_t page, int is_v, int slot) {
    return reinterpret_cast<__nv_bfloat16*>(p.pool + (2 * page + is_v) * p.half_bytes) +
           static_cast<int64_t>(slot) * p.head_dim + c;
  };
  if (first >= step) return;  // threads that no whole token is left for
#pragma unroll 2
  for (int t = first; t < run.num_tokens; t += step) {
    const __nv_bfloat16* k = at(src, 0, run.src_slot + t);
    const __nv_bfloat16* v = at(src, 1, run.src_slot + t);
    uint4 k_low = __ldg(reinterpret_cast<const uint4*>(k)), k_high = __ldg(reinterpret_cast<const uint4*>(k + half));
    const uint4 v_low = __ldg(reinterpret_cast<const uint4*>(v)),
                v_high = __ldg(reinterpret_cast<const uint4*>(v + half));
    if (run.rotation >= 0) Rotate8(k_low, k_high, cos, sin);
    __nv_bfloat16* k_to = at(dst, 0, run.dst_slot + t);
    __nv_bfloat16* v_to = at(dst, 1, run.dst_slot + t);
    *reinterpret_cast<uint4*>(k_to) = k_low;
    *reinterpret_cast<uint4*>(k_to + half) = k_high;
    *reinterpret_cast<uint4*>(v_to) = v_low;
    *reinterpret_cast<uint4*>(v_to + half) = v_high;
  }
}

// Everything else.
template <typename T>
__global__ void __launch_bounds__(kThreads) AlignKernel(Params p) {
  const AlignRun run = p.tables.runs[blockIdx.x / p.num_streams];
  const int64_t src = p.tables.src_pages[blockIdx.x], dst = p.tables.dst_pages[blockIdx.x];
  const T* k = reinterpret_cast<const T*>(p.pool + 2 * src * p.half_bytes) + run.src_slot * p.head_dim;
  const T* v = reinterpret_cast<const T*>(p.pool + (2 * src + 1) * p.half_bytes) + run.src_slot * p.head_dim;
  T* k_to = reinterpret_cast<T*>(p.pool + 2 * dst * p.half_bytes) + run.dst_slot * p.head_dim;
  T* v_to = reinterpret_cast<T*>(p.pool + (2 * dst + 1) * p.half_bytes) + run.dst_slot * p.head_dim;
  const int pairs = run.rotation >= 0 ? p.rotary_dim / 2 : 0, rest = p.head_dim - 2 * pairs;
  for (int i = threadIdx.x; i < run.num_tokens * p.head_dim; i += kThreads) v_to[i] = v[i];
  for (int i = threadIdx.x; i < run.num_tokens * rest; i += kThreads) {
    const int64_t at = static_cast<int64_t>(i / rest) * p.head_dim + 2 * pairs + i % rest;
    k_to[at] = k[at];
  }
  for (int i = threadIdx.x; i < run.num_tokens * pairs; i += kThreads) {
    const int c = i % pairs;
    const int64_t row = static_cast<int64_t>(i / pairs) * p.head_dim;
    const int64_t low = row + (p.interleaved ? 2 * c : c), high = row + (p.interleaved ? 2 * c + 1 : c + pairs);
    const float x = ToF(k[low]), y = ToF(k[high]);
    const float cos = p.tables.cos[static_cast<int64_t>(run.rotation) * pairs + c];
    const float sin = p.tables.sin[static_cast<int64_t>(run.rotation) * pairs + c];
    k_to[low] = FromF<T>(x * cos - y * sin);
    k_to[high] = FromF<T>(y * cos + x * sin);
  }
}

}  // namespace

cudaError_t AlignCopy(const AlignCopyArgs& a, const AlignCopyTables& tables, cudaStream_t stream) {
  if (a.runs.empty()) return cudaSuccess;
  const Params params{a.pool.base,   static_cast<int64_t>(a.pool.half_bytes()),
                      a.num_streams, a.pool.head_dim,
                      a.rotary_dim,  a.interleaved,
                      tables};
  const auto blocks = static_cast<unsigned>(a.runs.size() * static_cast<size_t>(a.num_streams));
  if (a.pool.dtype == DType::kF32) {
    AlignKernel<float><<<blocks, kThreads, 0, stream>>>(params);
  } else if (!a.interleaved && a.rotary_dim == a.pool.head_dim && a.pool.head_dim % (2 * kVector) == 0) {
    AlignHalvesKernel<<<blocks, kThreads, 0, stream>>>(params);
  } else {
    AlignKernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
