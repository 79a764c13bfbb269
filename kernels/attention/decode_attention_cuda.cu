// Decode attention with tensor cores (mma m16n8k16, sm_80 and later), split along the context.
//
// One CTA computes one split (kDecodeSplitTokens positions of one KV head of one sequence) for all query heads of that
// KV head, so K and V are read once. Its warps are independent: warp w owns slots [16 w, 16 w + 16) of every page,
// copies them into its own ring in shared memory and keeps its own running softmax; they meet once, at the end. Scores
// are computed transposed (rows are tokens, columns are query heads) so that 8 heads fill an mma. The last CTA of a KV
// head to finish adds the splits up in ascending order: the same bits whatever the timing.
#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/attention_cuda_ptx.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = kPageTokens / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplitPages = kDecodeSplitTokens / kPageTokens;
static_assert(kSplitPages <= 32);

struct Params {
  HeadRules rules;
  PagedBatch batch;
  int32_t slot_begin[kMaxKvHeads + 1];  // of KV head h among the blocks of a sequence
  const __nv_bfloat16* q;
  int64_t q_row_stride;
  __nv_bfloat16* out;
  float* lse;
  unsigned* counters;  // [num_sequences, num_kv_heads]
  float2* max_sum;     // [num_sequences, slots, group]: running maximum (log2 units) and sum of a split
  float* partial;      // [num_sequences, slots, group, head_dim], not yet divided by the sum
  int32_t num_kv_heads, group;
  float scale;
};

// Splits that hold something visible, in ascending order.
struct ActiveSplits {
  int32_t sinks, band_begin;  // visible: [0, sinks) and [band_begin, kv_len)
  int32_t sink_splits, first_band_split, count;

  __host__ __device__ ActiveSplits(Band band, int32_t kv_len) {
    band_begin = kv_len > band.window ? kv_len - band.window : 0;
    sinks = band.sinks < band_begin ? band.sinks : band_begin;
    first_band_split = band_begin / kDecodeSplitTokens;
    sink_splits = (sinks + kDecodeSplitTokens - 1) / kDecodeSplitTokens;
    if (sink_splits > first_band_split) sink_splits = first_band_split;
    count = kv_len <= 0 ? 0 : sink_splits + (kv_len - 1) / kDecodeSplitTokens - first_band_split + 1;
  }
  __device__ int32_t At(int i) const { return i < sink_splits ? i : first_band_split + i - sink_splits; }
};

// The most splits that can be active for any kv_len up to max_kv_len.
int32_t MaxSplits(Band band, int32_t max_kv_len) {
  const int64_t all = (int64_t{max_kv_len} + kDecodeSplitTokens - 1) / kDecodeSplitTokens;
  const int64_t of_sinks = (int64_t{band.sinks} + kDecodeSplitTokens - 1) / kDecodeSplitTokens;
  const int64_t of_band = (int64_t{band.window} + kDecodeSplitTokens - 2) / kDecodeSplitTokens + 1;
  return static_cast<int32_t>(std::max<int64_t>(std::min(all, of_sinks + of_band), 1));
}

// Stages of a warp's ring: four CTAs fit an SM of sm_90, and 128 KiB are in flight.
constexpr int Stages(int head_dim) { return 3 * 128 / head_dim; }

// kHeadTiles: 8 query heads each.
template <int kHeadDim, int kHeadTiles>
__global__ void __launch_bounds__(kThreads, kHeadTiles == 1 ? 4 : 3) DecodeMmaKernel(const __grid_constant__ Params p) {
  constexpr int kRowBytes = 2 * kHeadDim;
  constexpr int kChunks = kRowBytes / 16;     // 16-byte chunks per token
  constexpr int kHalfBytes = 16 * kRowBytes;  // K or V of one warp's 16 tokens: a stage of the ring
  constexpr int kStages = Stages(kHeadDim);
  constexpr int kRingBytes = kStages * kHalfBytes;
  constexpr int kCopies = kHalfBytes / (32 * 16);  // per lane and half
  constexpr int kMergeStride = kHeadDim + 4;       // floats; keeps the four lanes of a quad apart
  constexpr int kMergeBytes = 8 * kHeadTiles * kMergeStride * 4;
  static_assert(kMergeBytes <= kRingBytes);
  extern __shared__ __align__(1024) char smem[];
  __shared__ float2 warp_max_sum[kWarps][8 * kHeadTiles];
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, c = lane % 4;
  const int sequence = blockIdx.y, slot = blockIdx.x;
  int head = 0;
  while (slot >= p.slot_begin[head + 1]) ++head;
  const int slot_in_head = slot - p.slot_begin[head];
  const int64_t first_row_head = static_cast<int64_t>(sequence) * p.num_kv_heads * p.group + head * p.group;
  const int32_t kv_len = p.batch.kv_len[sequence];
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;

  const ActiveSplits splits(BandOf(p.rules.head[head]), kv_len);
  if (slot_in_head >= max(splits.count, 1)) return;
  if (splits.count == 0) {
    for (int i = threadIdx.x; i < p.group * kHeadDim; i += kThreads) {
      p.out[first_row_head * kHeadDim + i] = __float2bfloat16(0.0f);
    }
    if (p.lse != nullptr && threadIdx.x < p.group) p.lse[first_row_head + threadIdx.x] = -INFINITY;
    return;
  }
  const int32_t first_page = splits.At(slot_in_head) * kSplitPages;

  // Lane i looks up page i of the split.
  int32_t physical = kNoPage;
  if (lane < kSplitPages) {
    const int32_t begin = (first_page + lane) * kPageTokens;
    const bool visible = begin < kv_len && (begin < splits.sinks || begin + kPageTokens > splits.band_begin);
    if (visible) physical = table[first_page + lane];
  }
  const unsigned pages = __ballot_sync(0xffffffffu, physical >= 0);

  // q as B operand: lane holds head g, dims 16 k + 2 c (+1, +8, +9).
  uint32_t q[kHeadTiles][kHeadDim / 16][2];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const bool exists = 8 * t + g < p.group;
    const auto* row = reinterpret_cast<const uint32_t*>(p.q + sequence * p.q_row_stride +
                                                        (head * p.group + (exists ? 8 * t + g : 0)) * kHeadDim);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      q[t][k][0] = exists ? row[8 * k + c] : 0;
      q[t][k][1] = exists ? row[8 * k + c + 4] : 0;
    }
  }

  // K and V of one page after the other go through the ring as separate stages.
  const uint32_t ring = SmemAddress(smem) + warp * kRingBytes;
  unsigned to_load = pages, to_use = pages;
  bool load_v = false;
  uint32_t load_at = ring, use_at = ring;
  const auto advance = [&](uint32_t& at) {
    at += kHalfBytes;
    if (at == ring + kRingBytes) at = ring;
  };
  const auto issue = [&] {
    if (to_load != 0) {
      const int i = __ffs(to_load) - 1;
      const int32_t page = __shfl_sync(0xffffffffu, physical, i);
      const char* source = reinterpret_cast<const char*>(p.batch.pool.base) +
                           (static_cast<int64_t>(page) * 2 + load_v) * (kPageTokens * kRowBytes) + warp * kHalfBytes;
      const int32_t begin = (first_page + i) * kPageTokens + 16 * warp;
#pragma unroll
      for (int n = 0; n < kCopies; ++n) {
        const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
        const int32_t j = begin + token;
        const bool visible = j < kv_len && (j < splits.sinks || j >= splits.band_begin);
        CpAsync16(load_at + Swizzled<kRowBytes>(token, chunk), source + token * kRowBytes + chunk * 16, visible);
      }
      if (load_v) to_load &= to_load - 1;
      load_v = !load_v;
    }
    CpAsyncCommit();
    advance(load_at);
  };
  // The next stage to use has landed for every lane, and every lane is done with the one that is refilled now.
  const auto next_stage = [&] {
    CpAsyncWait<kStages - 2>();
    __syncwarp();
    issue();
    const uint32_t at = use_at;
    advance(use_at);
    return at;
  };

  float o[kHeadTiles][kHeadDim / 16][4] = {};  // rows: dims 16 i + g (+8); columns: heads 2 c, 2 c + 1
  float m[kHeadTiles][2], l[kHeadTiles][2];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) m[t][0] = m[t][1] = -INFINITY, l[t][0] = l[t][1] = 0;

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) issue();
  while (to_use != 0) {
    const int i = __ffs(to_use) - 1;
    to_use &= to_use - 1;
    const uint32_t k_tile = next_stage();

    float s[kHeadTiles][4] = {};  // tokens g, g + 8; heads 2 c, 2 c + 1
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4(a, k_tile + Swizzled<kRowBytes>(lane & 15, 2 * k + lane / 16));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(s[t], a, q[t][k][0], q[t][k][1]);
    }
    const int32_t j = (first_page + i) * kPageTokens + 16 * warp + g;
    const bool visible0 = j < kv_len && (j < splits.sinks || j >= splits.band_begin);
    const bool visible1 = j + 8 < kv_len && (j + 8 < splits.sinks || j + 8 >= splits.band_begin);
    uint32_t weights[kHeadTiles][2];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& s0 = s[t][h];
        float& s1 = s[t][2 + h];
        s0 = visible0 ? s0 * p.scale : -INFINITY;
        s1 = visible1 ? s1 * p.scale : -INFINITY;
        float max = fmaxf(s0, s1);
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
        max = fmaxf(max, m[t][h]);
        const float base = max == -INFINITY ? 0.0f : max;
        const float shrink = Exp2(m[t][h] - base);
        m[t][h] = max;
        s0 = Exp2(s0 - base);
        s1 = Exp2(s1 - base);
        l[t][h] = l[t][h] * shrink + (s0 + s1);  // this lane's tokens only
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          o[t][k][h] *= shrink;
          o[t][k][2 + h] *= shrink;
        }
      }
      // Rows are tokens; as B operand they must be columns.
      weights[t][0] = TransposeMatrix(PackBf16(s[t][0], s[t][1]));
      weights[t][1] = TransposeMatrix(PackBf16(s[t][2], s[t][3]));
    }
    const uint32_t v_tile = next_stage();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4Trans(a, v_tile + Swizzled<kRowBytes>(lane / 16 * 8 + (lane & 7), 2 * k + (lane >> 3 & 1)));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(o[t][k], a, weights[t][0], weights[t][1]);
    }
  }
  CpAsyncWait<0>();

  // Merge the warps: each writes its sums over its own ring.
  __syncwarp();
  float* merge = reinterpret_cast<float*>(smem + warp * kRingBytes);
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = l[t][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      const int column = 8 * t + 2 * c + h;
      if (g == 0) warp_max_sum[warp][column] = float2{m[t][h], sum};
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        merge[column * kMergeStride + 16 * k + g] = o[t][k][h];
        merge[column * kMergeStride + 16 * k + g + 8] = o[t][k][2 + h];
      }
    }
  }
  __syncthreads();

  // From here on a thread owns four dims of a query head.
  constexpr int kQuads = kHeadDim / 4;
  const int64_t slots = p.slot_begin[p.num_kv_heads];
  const int64_t head_slot = sequence * slots + p.slot_begin[head];
  const int64_t my_slot = head_slot + slot_in_head;
  const auto write = [&](int row, int quad, float4 x, float max, float sum) {
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    uint2 packed{PackBf16(x.x * inverse, x.y * inverse), PackBf16(x.z * inverse, x.w * inverse)};
    *reinterpret_cast<uint2*>(p.out + (first_row_head + row) * kHeadDim + 4 * quad) = packed;
    if (p.lse != nullptr && quad == 0) p.lse[first_row_head + row] = sum > 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
  };
  for (int at = threadIdx.x; at < p.group * kQuads; at += kThreads) {
    const int row = at / kQuads, quad = at % kQuads;
    float max = warp_max_sum[0][row].x;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, warp_max_sum[w][row].x);
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0;
    float4 x{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = Exp2(warp_max_sum[w][row].x - base);
      sum += weight * warp_max_sum[w][row].y;
      const float4 y =
          *reinterpret_cast<const float4*>(smem + w * kRingBytes + (row * kMergeStride + 4 * quad) * sizeof(float));
      x = float4{x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w};
    }
    if (splits.count == 1) {
      write(row, quad, x, max, sum);
    } else {
      if (quad == 0) p.max_sum[my_slot * p.group + row] = float2{max, sum};
      reinterpret_cast<float4*>(p.partial)[(my_slot * p.group + row) * kQuads + quad] = x;
    }
  }
  if (splits.count == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    // Wraps to zero at the last arrival: ready for the next launch.
    const unsigned before = atomicInc(&p.counters[sequence * p.num_kv_heads + head], splits.count - 1);
    is_last = before == static_cast<unsigned>(splits.count) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const float2* max_sum = p.max_sum + head_slot * p.group;
  const float4* partial = reinterpret_cast<const float4*>(p.partial) + head_slot * p.group * kQuads;
  auto* some_max_sum = reinterpret_cast<float2*>(smem);
  const int at_once = kWarps * kRingBytes / static_cast<int>(sizeof(float2)) / p.group;  // splits
  for (int first = 0; first < p.group * kQuads; first += kThreads) {
    const int at = min(first + static_cast<int>(threadIdx.x), p.group * kQuads - 1);
    const int row = at / kQuads, quad = at % kQuads;
    float max = -INFINITY, sum = 0;
    float4 x{0, 0, 0, 0};
    for (int begin = 0; begin < splits.count; begin += at_once) {
      const int n = min(at_once, splits.count - begin);
      constexpr int kAhead = 16;
      float4 y[kAhead];
      const auto load = [&](int i) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (i + k < n) y[k] = __ldcg(&partial[(static_cast<int64_t>(begin + i + k) * p.group + row) * kQuads + quad]);
        }
      };
      load(0);
      __syncthreads();
      for (int i = threadIdx.x; i < n * p.group; i += kThreads) {
        some_max_sum[i] = __ldcg(&max_sum[static_cast<int64_t>(begin) * p.group + i]);
      }
      __syncthreads();
      float next = max;
      for (int i = 0; i < n; ++i) next = fmaxf(next, some_max_sum[i * p.group + row].x);
      const float base = next == -INFINITY ? 0.0f : next;
      const float shrink = Exp2(max - base);
      max = next;
      sum *= shrink;
      x = float4{x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
      for (int i = 0; i < n; i += kAhead) {
        if (i > 0) load(i);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (i + k < n) {
            const float2 ms = some_max_sum[(i + k) * p.group + row];
            const float weight = Exp2(ms.x - base);
            sum += weight * ms.y;
            x = float4{x.x + weight * y[k].x, x.y + weight * y[k].y, x.z + weight * y[k].z, x.w + weight * y[k].w};
          }
        }
      }
    }
    if (first + threadIdx.x < p.group * kQuads) write(row, quad, x, max, sum);
  }
}

template <int kHeadDim, int kHeadTiles>
cudaError_t Launch(const Params& p, int num_sequences, cudaStream_t stream) {
  const auto kernel = DecodeMmaKernel<kHeadDim, kHeadTiles>;
  constexpr int kSmemBytes = kWarps * Stages(kHeadDim) * 16 * 2 * kHeadDim;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (e != cudaSuccess) return e;
  const dim3 grid(p.slot_begin[p.num_kv_heads], num_sequences);
  kernel<<<grid, kThreads, kSmemBytes, stream>>>(p);
  return cudaGetLastError();
}

size_t CounterBytes(const AttentionHeads& heads, int32_t num_sequences) {
  return (static_cast<size_t>(num_sequences) * heads.num_kv_heads * sizeof(unsigned) + 255) / 256 * 256;
}

// Per split: a float2 per query head, then head_dim floats per query head.
size_t SplitCount(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len) {
  return static_cast<size_t>(num_sequences) * heads.num_kv_heads * MaxSplits(Band{0, kFullWindow}, max_kv_len);
}

}  // namespace

size_t DecodeWorkspaceBytes(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len) {
  const size_t group = heads.num_qo_heads / std::max(heads.num_kv_heads, 1);
  return CounterBytes(heads, num_sequences) +
         SplitCount(heads, num_sequences, max_kv_len) * group * (sizeof(float2) + heads.head_dim * sizeof(float));
}

cudaError_t DecodeMma(const DecodeArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0;
  if (cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (capability < 80 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out) ||
      group > kMaxDecodeGroup || a.batch.num_sequences > 65535) {
    return cudaErrorNotSupported;
  }
  if (!Aligned16(a.workspace)) return cudaErrorInvalidValue;
  Params p{};
  p.rules = a.rules;
  p.batch = a.batch;
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    p.slot_begin[h + 1] = p.slot_begin[h] + MaxSplits(BandOf(a.rules.head[h]), a.max_kv_len);
  }
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_row_stride = a.q_row_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  char* workspace = static_cast<char*>(a.workspace);
  p.counters = reinterpret_cast<unsigned*>(workspace);
  workspace += CounterBytes(a.heads, a.batch.num_sequences);
  // Sized for all heads kFull; fewer slots are used when some are not. The sums come first: 16-byte aligned pieces.
  p.partial = reinterpret_cast<float*>(workspace);
  const size_t slots = static_cast<size_t>(a.batch.num_sequences) * p.slot_begin[a.heads.num_kv_heads];
  p.max_sum = reinterpret_cast<float2*>(p.partial + slots * group * a.heads.head_dim);
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = group;
  p.scale = a.heads.sm_scale * kLog2e;
  if (a.heads.head_dim == 64) {
    return group <= 8 ? Launch<64, 1>(p, a.batch.num_sequences, stream)
                      : Launch<64, 2>(p, a.batch.num_sequences, stream);
  }
  return group <= 8 ? Launch<128, 1>(p, a.batch.num_sequences, stream)
                    : Launch<128, 2>(p, a.batch.num_sequences, stream);
}

}  // namespace spl::kernels::cuda
