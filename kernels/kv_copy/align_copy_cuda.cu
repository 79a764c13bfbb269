#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"
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

// Rows of codes. A key that is turned is widened, turned and rounded once more, with a scale of its own.
struct CodeRows {
  uint8_t* codes;
  uint8_t* scales;  // of the same rows

  __device__ __forceinline__ CodeRows(const Params& p, int64_t page, int is_v, int first_slot) {
    auto* half = reinterpret_cast<uint8_t*>(p.pool + (2 * page + is_v) * p.half_bytes);
    codes = half + first_slot * p.head_dim;
    scales = half + kPageTokens * p.head_dim + first_slot;
  }
};

__device__ __forceinline__ void Widen8(uint2 codes, uint32_t scale, float (&x)[8]) {
  const __nv_bfloat162 factor = RowFactor(scale);
  const uint2 first = SmallBf16Quad(codes.x), second = SmallBf16Quad(codes.y);
  const uint32_t pairs[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t wide = TimesRowFactor(pairs[i], factor);
    const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&wide));
    x[2 * i] = y.x;
    x[2 * i + 1] = y.y;
  }
}
__device__ __forceinline__ uint2 Codes8(const float (&x)[8], float by) {
  return {E4M3Pair(x[0] * by, x[1] * by) | E4M3Pair(x[2] * by, x[3] * by) << 16,
          E4M3Pair(x[4] * by, x[5] * by) | E4M3Pair(x[6] * by, x[7] * by) << 16};
}

// As AlignHalvesKernel, where the threads of a token are a power of two. They are neighbours in a warp.
__global__ void __launch_bounds__(kThreads) AlignCodeHalvesKernel(Params p) {
  const AlignRun run = p.tables.runs[blockIdx.x / p.num_streams];
  const int64_t src = p.tables.src_pages[blockIdx.x], dst = p.tables.dst_pages[blockIdx.x];
  const int half = p.head_dim / 2, threads_a_token = half / kVector;
  const int lane = static_cast<int>(threadIdx.x) % threads_a_token, c = lane * kVector;
  const int step = kThreads / threads_a_token;
  float cos[kVector], sin[kVector];
  if (run.rotation >= 0) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      cos[i] = p.tables.cos[static_cast<int64_t>(run.rotation) * half + c + i];
      sin[i] = p.tables.sin[static_cast<int64_t>(run.rotation) * half + c + i];
    }
  }
  const CodeRows k(p, src, 0, run.src_slot), v(p, src, 1, run.src_slot);
  const CodeRows k_to(p, dst, 0, run.dst_slot), v_to(p, dst, 1, run.dst_slot);
  const auto pair = [](uint8_t* row) { return reinterpret_cast<uint2*>(row); };
#pragma unroll 2
  for (int first = 0; first < run.num_tokens; first += step) {
    // All threads of a warp stay, for the maximum over those of a token; tokens past the last one are not stored.
    const int t = first + static_cast<int>(threadIdx.x) / threads_a_token;
    const bool exists = t < run.num_tokens;
    const int64_t at = static_cast<int64_t>(exists ? t : 0) * p.head_dim + c;
    uint2 low = *pair(k.codes + at), high = *pair(k.codes + at + half);
    const uint2 v_low = *pair(v.codes + at), v_high = *pair(v.codes + at + half);
    uint32_t scale = k.scales[exists ? t : 0];
    const uint8_t v_scale = v.scales[exists ? t : 0];
    if (run.rotation >= 0) {
      float x[kVector], y[kVector];
      Widen8(low, scale, x);
      Widen8(high, scale, y);
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float turned = x[i] * cos[i] - y[i] * sin[i];
        y[i] = y[i] * cos[i] + x[i] * sin[i];
        x[i] = turned;
        largest = max(largest, max(Magnitude(x[i]), Magnitude(y[i])));
      }
      for (int offset = threads_a_token / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      scale = RowScaleOfBits(largest);
      const float by = InverseRowScaleOf(scale);
      low = Codes8(x, by);
      high = Codes8(y, by);
    }
    if (!exists) continue;
    *pair(k_to.codes + at) = low;
    *pair(k_to.codes + at + half) = high;
    *pair(v_to.codes + at) = v_low;
    *pair(v_to.codes + at + half) = v_high;
    if (lane == 0) {
      k_to.scales[t] = static_cast<uint8_t>(scale);
      v_to.scales[t] = v_scale;
    }
  }
}

// Any other shape: a warp for a token, of which lane l has elements l + 32 i.
__global__ void __launch_bounds__(kThreads) AlignCodesKernel(Params p) {
  constexpr int kMost = 256 / 32;
  const AlignRun run = p.tables.runs[blockIdx.x / p.num_streams];
  const int64_t src = p.tables.src_pages[blockIdx.x], dst = p.tables.dst_pages[blockIdx.x];
  const CodeRows k(p, src, 0, run.src_slot), v(p, src, 1, run.src_slot);
  const CodeRows k_to(p, dst, 0, run.dst_slot), v_to(p, dst, 1, run.dst_slot);
  const int pairs = run.rotation >= 0 ? p.rotary_dim / 2 : 0, lane = static_cast<int>(threadIdx.x) % 32;
  for (int t = static_cast<int>(threadIdx.x) / 32; t < run.num_tokens; t += kThreads / 32) {
    const int64_t row = static_cast<int64_t>(t) * p.head_dim;
    for (int e = lane; e < p.head_dim; e += 32) v_to.codes[row + e] = v.codes[row + e];
    if (lane == 0) v_to.scales[t] = v.scales[t];
    if (pairs == 0) {
      for (int e = lane; e < p.head_dim; e += 32) k_to.codes[row + e] = k.codes[row + e];
      if (lane == 0) k_to.scales[t] = k.scales[t];
      continue;
    }
    const float old_scale = RowScaleFloat(k.scales[t]);
    const auto value = [&](int e) { return E4M3Float(k.codes[row + e]) * old_scale; };
    float x[kMost] = {};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int e = lane + 32 * i;
      if (e >= p.head_dim) break;
      if (e < 2 * pairs) {
        const int c = p.interleaved ? e / 2 : e % pairs;
        const int low = p.interleaved ? 2 * c : c, high = p.interleaved ? 2 * c + 1 : c + pairs;
        const float cos = p.tables.cos[static_cast<int64_t>(run.rotation) * pairs + c];
        const float sin = p.tables.sin[static_cast<int64_t>(run.rotation) * pairs + c];
        x[i] = e == low ? value(low) * cos - value(high) * sin : value(high) * cos + value(low) * sin;
      } else {
        x[i] = value(e);
      }
      largest = max(largest, Magnitude(x[i]));
    }
    const uint32_t scale = RowScaleOfBits(WarpLargest(largest));
    const float by = InverseRowScaleOf(scale);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (lane + 32 * i < p.head_dim) k_to.codes[row + lane + 32 * i] = static_cast<uint8_t>(E4M3Pair(x[i] * by, 0.0f));
    }
    if (lane == 0) k_to.scales[t] = static_cast<uint8_t>(scale);
  }
}

cudaError_t AlignCodes(const AlignCopyArgs& a, const Params& params, unsigned blocks, cudaStream_t stream) {
  const int threads_a_token = a.pool.head_dim / 2 / kVector;
  if (!a.interleaved && a.rotary_dim == a.pool.head_dim && a.pool.head_dim % (2 * kVector) == 0 &&
      (threads_a_token & (threads_a_token - 1)) == 0 && threads_a_token <= 32) {
    AlignCodeHalvesKernel<<<blocks, kThreads, 0, stream>>>(params);
  } else {
    if (a.pool.head_dim > 256) return cudaErrorNotSupported;
    AlignCodesKernel<<<blocks, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t AlignCopy(const AlignCopyArgs& a, const AlignCopyTables& tables, cudaStream_t stream) {
  if (a.runs.empty()) return cudaSuccess;
  const Params params{a.pool.base,   static_cast<int64_t>(a.pool.half_bytes()),
                      a.num_streams, a.pool.head_dim,
                      a.rotary_dim,  a.interleaved,
                      tables};
  const auto blocks = static_cast<unsigned>(a.runs.size() * static_cast<size_t>(a.num_streams));
  if (a.pool.dtype == DType::kE4M3) return AlignCodes(a, params, blocks, stream);
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
