// Attention for any shape and type of the contract: the fall-back, and the f32 path. Plain SIMT.
//
// One CTA per (row, query head). Warp w takes every eighth tile of 32 keys, lane j scoring key j and then summing dims
// j, j + 32, ...; the warps' running softmaxes merge in ascending order at the end. Which warp takes a key depends on
// its position alone.
#include <type_traits>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxDim = 256;

struct Params {
  HeadRules rules;
  PagedBatch batch;
  const Band* plans;  // see DecodeArgs
  const int64_t* plan_offset;
  TokenLists lists;
  int32_t last_rows;
  HeadsOf which;
  uint64_t skip_heads;
  PrefillLines lines;
  const int32_t* row_begin;  // null: decode, row s is sequence s at position kv_len - 1
  const int32_t* positions;
  const void* q;
  int64_t q_row_stride;
  void* out;
  float* lse;
  int32_t num_qo_heads, group, head_dim;
  float sm_scale;
};

// Elements of pages. Kv is uint8_t for codes; a row of them has a factor, at `scale`.
template <typename Kv>
__device__ __forceinline__ float ValueOf(Kv x) {
  return ToF(x);
}
template <>
__device__ __forceinline__ float ValueOf<uint8_t>(uint8_t code) {
  return E4M3Float(code);
}
template <typename Kv>
constexpr bool kIsCode = std::is_same_v<Kv, uint8_t>;
template <typename Kv>
__device__ __forceinline__ float ScoreOf(const float* q, const Kv* key, int dim) {
  float dot = 0;
  for (int i = 0; i < dim; ++i) dot = fmaf(q[i], ValueOf(key[i]), dot);
  return dot;
}

template <typename Q, typename Kv>
__global__ void __launch_bounds__(32 * kWarps) GenericKernel(const __grid_constant__ Params p) {
  __shared__ float q[kMaxDim];
  __shared__ float sums[kWarps][kMaxDim];
  __shared__ float maxima[kWarps], totals[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.head_dim;
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / p.group;
  const bool has_lines = p.rules.head[kv_head].rule == VisibilityRule::kLines;
  if (p.which != HeadsOf::kAll && has_lines != (p.which == HeadsOf::kLines)) return;
  if ((p.skip_heads >> kv_head & 1) != 0) return;

  int sequence = static_cast<int>(row);
  int32_t position = 0;
  if (p.row_begin != nullptr) {
    int low = 0, high = p.batch.num_sequences;  // row_begin[low] <= row < row_begin[high]
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (p.row_begin[mid] <= row) {
        low = mid;
      } else {
        high = mid;
      }
    }
    sequence = low;
    if (p.last_rows > 0 && row < p.row_begin[low + 1] - p.last_rows) return;
    position = p.positions[row];
  } else {
    position = p.batch.kv_len[sequence] - 1;
  }
  const Band band = p.plans == nullptr ? BandOf(p.rules.head[kv_head]) : p.plans[p.plan_offset[sequence] + kv_head];
  if (band.window == kElsewhereWindow) return;
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + kv_head * p.batch.head_stride;
  const Q* q_row = static_cast<const Q*>(p.q) + row * p.q_row_stride + static_cast<int64_t>(head) * dim;
  for (int i = threadIdx.x; i < dim; i += 32 * kWarps) q[i] = ToF(q_row[i]) * p.sm_scale;
  __syncthreads();
  const int32_t band_begin = max(position - band.window + 1, 0);
  // For a head with a list: entry i stands for position list[i]. Null: for itself.
  const int32_t* list = nullptr;
  int32_t last = position;
  if (band.window == kSelectedWindow) {
    const int64_t stream = int64_t{sequence} * (p.num_qo_heads / p.group) + kv_head;
    list = p.lists.tokens + stream * p.lists.stride;
    last = p.lists.counts[stream] - 1;
  }
  const Kv* pool = reinterpret_cast<const Kv*>(p.batch.pool.base);
  const int64_t half = int64_t{kPageTokens} * (dim + (kIsCode<Kv> ? 1 : 0));  // elements
  float max = -INFINITY, total = 0, sum[kMaxDim / 32] = {};
  // For a head with lines: the words of the row's tile.
  const uint64_t *line_tiles = nullptr, *column_masks = nullptr;
  const int32_t* columns = nullptr;
  int64_t num_columns = 0;
  if (has_lines) {
    const int64_t line = int64_t{kv_head} * p.lines.row_tiles + (position - p.positions[0]) / 64;
    line_tiles = p.lines.tiles + line * p.lines.tile_words;
    column_masks = p.lines.column_masks + line * p.lines.column_words;
    num_columns = int64_t{p.lines.column_words} * 64;
    columns = p.lines.columns + kv_head * num_columns;
  }
  const int64_t num_tiles = last / 32 + 1;
  for (int64_t tile = warp; tile < num_tiles + num_columns / 32; tile += kWarps) {
    int32_t j;
    bool visible;
    if (tile < num_tiles) {
      j = static_cast<int32_t>(tile * 32) + lane;
      visible = j <= last;
      if (list != nullptr) {
        j = visible ? list[j] : 0;
      } else if (has_lines) {
        visible = visible && (line_tiles[j / 4096] >> (j / 64 % 64) & 1) != 0;
      } else {
        visible = visible && (j < band.sinks || j >= band_begin);
      }
    } else {
      const int64_t i = (tile - num_tiles) * 32 + lane;
      visible = (column_masks[i / 64] >> (i % 64) & 1) != 0;
      j = visible ? columns[i] : 0;
    }
    const int32_t page = visible ? table[j / kPageTokens] : -1;
    visible = page >= 0;
    const unsigned any = __ballot_sync(0xffffffffu, visible);
    if (any == 0) continue;
    const int64_t offset = 2 * half * page + static_cast<int64_t>(j % kPageTokens) * dim;  // address of the lane's key
    float score = -INFINITY, v_factor = 1;
    if (visible) score = ScoreOf(q, pool + offset, dim);
    if constexpr (kIsCode<Kv>) {
      const uint8_t* scale = pool + 2 * half * page + int64_t{kPageTokens} * dim + j % kPageTokens;
      if (visible) score *= RowScaleFloat(scale[0]), v_factor = RowScaleFloat(scale[half]);
    }
    float tile_max = score;
    for (int d = 16; d > 0; d /= 2) tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, d));
    const float next = fmaxf(max, tile_max);
    const float shrink = expf(max - next);
    const float weight = expf(score - next), v_weight = weight * v_factor;
    max = next;
    total = total * shrink + weight;  // this lane's keys
#pragma unroll
    for (int i = 0; i < kMaxDim / 32; ++i) sum[i] *= shrink;
    for (unsigned rest = any; rest != 0; rest &= rest - 1) {
      const int t = __ffs(rest) - 1;
      const float w = __shfl_sync(0xffffffffu, v_weight, t);
      const Kv* v = pool + half + __shfl_sync(0xffffffffu, offset, t);
#pragma unroll
      for (int i = 0; i < kMaxDim / 32; ++i) {
        if (32 * i + lane < dim) sum[i] = fmaf(w, ValueOf(v[32 * i + lane]), sum[i]);
      }
    }
  }
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
  if (lane == 0) maxima[warp] = max, totals[warp] = total;
#pragma unroll
  for (int i = 0; i < kMaxDim / 32; ++i) {
    if (32 * i + lane < dim) sums[warp][32 * i + lane] = sum[i];
  }
  __syncthreads();
  max = -INFINITY;
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, maxima[w]);
  total = 0;
  for (int w = 0; w < kWarps; ++w) total += totals[w] > 0 ? totals[w] * expf(maxima[w] - max) : 0.0f;
  const int64_t at = row * p.num_qo_heads + head;
  for (int i = threadIdx.x; i < dim; i += 32 * kWarps) {
    float x = 0;
    for (int w = 0; w < kWarps; ++w) x += totals[w] > 0 ? sums[w][i] * expf(maxima[w] - max) : 0.0f;
    static_cast<Q*>(p.out)[at * dim + i] = FromF<Q>(total > 0 ? x / total : 0.0f);
  }
  if (p.lse != nullptr && threadIdx.x == 0) p.lse[at] = total > 0 ? max + logf(total) : -INFINITY;
}

cudaError_t Launch(const Params& p, DType q_type, DType kv_type, int64_t rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows), p.num_qo_heads);
  if (p.num_qo_heads > 65535) return cudaErrorNotSupported;
  const auto launch = [&](auto q) {
    using Q = decltype(q);
    if (kv_type == DType::kE4M3) return GenericKernel<Q, uint8_t><<<grid, 32 * kWarps, 0, stream>>>(p);
    if (kv_type == DType::kF32) return GenericKernel<Q, float><<<grid, 32 * kWarps, 0, stream>>>(p);
    GenericKernel<Q, __nv_bfloat16><<<grid, 32 * kWarps, 0, stream>>>(p);
  };
  if (q_type == DType::kF32) {
    launch(float{});
  } else {
    launch(__nv_bfloat16{});
  }
  return cudaGetLastError();
}

template <typename Args>
Params Common(const Args& a) {
  Params p{};
  p.rules = a.rules;
  p.batch = a.batch;
  p.q = a.q;
  p.q_row_stride = a.q_row_stride;
  p.out = a.out;
  p.lse = a.lse;
  p.num_qo_heads = a.heads.num_qo_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.head_dim = a.heads.head_dim;
  p.sm_scale = a.heads.sm_scale;
  return p;
}

}  // namespace

cudaError_t PrefillGeneric(const PrefillArgs& a, cudaStream_t stream, HeadsOf which) {
  Params p = Common(a);
  p.which = which;
  p.skip_heads = a.skip_heads;
  p.lines = a.lines;
  p.row_begin = a.row_begin;
  p.last_rows = a.last_rows;
  p.positions = a.positions;
  return Launch(p, a.dtype, a.batch.pool.dtype, a.num_rows, stream);
}

cudaError_t DecodeGeneric(const DecodeArgs& a, cudaStream_t stream) {
  Params p = Common(a);
  p.plans = a.plans;
  p.plan_offset = a.plan_offset;
  p.lists = a.lists;
  return Launch(p, a.dtype, a.batch.pool.dtype, a.batch.num_sequences, stream);
}

}  // namespace spl::kernels::cuda
