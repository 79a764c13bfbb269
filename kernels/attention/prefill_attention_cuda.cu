// Prefill attention with mma m16n8k16 and cp.async, for sm_80 and later.
//
// One CTA per tile (128 rows of one query head), 16 rows per warp; pages stream through a ring of two stages in shared
// memory that all warps read; softmax online in base 2. (The scheme of FlashAttention-2: Dao, 2023, section 3.)
#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = kTileRows / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 2;

struct Params {
  Schedule schedule;
  HeadRules rules;
  PagedBatch batch;
  RowRanges rows;
  const int32_t* positions;
  const __nv_bfloat16* q;
  int64_t q_row_stride;
  __nv_bfloat16* out;
  float* lse;
  int32_t num_qo_heads, group;
  float scale;
};

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) PrefillMmaKernel(const __grid_constant__ Params p) {
  constexpr int kRowBytes = 2 * kHeadDim;
  constexpr int kChunks = kRowBytes / 16;
  constexpr int kHalfBytes = kPageTokens * kRowBytes;
  constexpr int kStageBytes = 2 * kHalfBytes;
  extern __shared__ __align__(1024) char smem[];
  __shared__ Tile tile;
  __shared__ bool any;

  if (threadIdx.x < 32) {
    Tile found;
    const bool ok = SequenceRows(p.rows, p.batch.num_sequences).FindTile(p.schedule, p.group, blockIdx.x, &found);
    if (threadIdx.x == 0) {
      any = ok;
      if (ok) tile = found;
    }
  }
  __syncthreads();
  if (!any) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int32_t* positions = p.positions + tile.row;
  const TileView view(BandOf(p.rules.head[tile.kv_head]), positions, tile.num_rows, positions[0],
                      positions[tile.num_rows - 1], 1);
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[tile.sequence] + tile.kv_head * p.batch.head_stride;
  const int32_t kv_len = p.batch.kv_len[tile.sequence];

  // q as A operand: rows g and g + 8 of the warp, dims 16 k + 2 c (+1) and 16 k + 8 + 2 c (+1).
  const int row0 = 16 * warp + g, row1 = row0 + 8;
  const int32_t position0 = row0 < tile.num_rows ? view.positions[row0] : -1;
  const int32_t position1 = row1 < tile.num_rows ? view.positions[row1] : -1;
  uint32_t q[kHeadDim / 16][4];
  {
    const __nv_bfloat16* base = p.q + static_cast<int64_t>(tile.qo_head) * kHeadDim + 2 * c;
    const auto word = [&](int row, int dim) -> uint32_t {
      if (row >= tile.num_rows) return 0;
      return *reinterpret_cast<const uint32_t*>(base + (tile.row + row) * p.q_row_stride + dim);
    };
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      q[k][0] = word(row0, 16 * k);
      q[k][1] = word(row1, 16 * k);
      q[k][2] = word(row0, 16 * k + 8);
      q[k][3] = word(row1, 16 * k + 8);
    }
  }

  struct Page {
    int32_t logical;
    int32_t physical;
  };
  int candidate = 0;
  const auto next_page = [&]() -> Page {
    for (; candidate < view.num_candidates; ++candidate) {
      const int32_t page = view.Candidate(candidate);
      if (!view.Sees(page)) continue;
      const int32_t physical = table[page];
      if (physical < 0) continue;
      ++candidate;
      return {page, physical};
    }
    return {-1, -1};
  };
  const uint32_t ring = SmemAddress(smem);
  const auto issue = [&](Page page, int stage) {
    if (page.logical >= 0) {
      const char* source =
          reinterpret_cast<const char*>(p.batch.pool.base) + static_cast<int64_t>(page.physical) * kStageBytes;
#pragma unroll
      for (int n = 0; n < kPageTokens * kChunks / kThreads; ++n) {
        const int at = n * kThreads + threadIdx.x;
        const int token = at / kChunks, chunk = at % kChunks;
        const bool written = page.logical * kPageTokens + token < kv_len;
        const uint32_t target = ring + stage * kStageBytes + Swizzled<kRowBytes>(token, chunk);
        CpAsync16(target, source + at * 16, written);
        CpAsync16(target + kHalfBytes, source + kHalfBytes + at * 16, written);
      }
    }
    CpAsyncCommit();
  };

  float o[kHeadDim / 8][4] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
  Page page = next_page();
  issue(page, 0);
  for (int stage = 0; page.logical >= 0; stage ^= 1) {
    const Page following = next_page();
    issue(following, stage ^ 1);
    CpAsyncWait<1>();
    __syncthreads();
    const uint32_t k_tile = ring + stage * kStageBytes, v_tile = k_tile + kHalfBytes;

    float s[8][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        LdMatrix4(b, k_tile + Swizzled<kRowBytes>(16 * n + lane / 16 * 8 + (lane & 7), 2 * k + (lane >> 3 & 1)));
        Mma16816(s[2 * n], q[k], b[0], b[1]);
        Mma16816(s[2 * n + 1], q[k], b[2], b[3]);
      }
    }
    const int32_t begin = page.logical * kPageTokens;
    if (!view.AllSee(begin, begin + kPageTokens)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t j = begin + 8 * i + 2 * c + (e & 1), position = e < 2 ? position0 : position1;
          const bool visible = j <= position && (j < view.band.sinks || j > position - view.band.window);
          s[i][e] = visible ? s[i][e] : -INFINITY;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = -INFINITY;
#pragma unroll
      for (int i = 0; i < 8; ++i) max = fmaxf(max, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
      max = fmaxf(m[r], __fmul_rn(max, p.scale));
      const float base = max == -INFINITY ? 0.0f : max;
      const float shrink = Exp2(m[r] - base);
      m[r] = max;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[i][e] = Exp2(__fmaf_rn(s[i][e], p.scale, -base));
          sum += s[i][e];
        }
      }
      l[r] = __fmaf_rn(l[r], shrink, sum);
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        o[i][2 * r] *= shrink;
        o[i][2 * r + 1] *= shrink;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t a[4] = {PackBf16(s[2 * k][0], s[2 * k][1]), PackBf16(s[2 * k][2], s[2 * k][3]),
                             PackBf16(s[2 * k + 1][0], s[2 * k + 1][1]), PackBf16(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; ++n) {
        uint32_t b[4];
        LdMatrix4Trans(b, v_tile + Swizzled<kRowBytes>(16 * k + (lane & 15), 2 * n + lane / 16));
        Mma16816(o[2 * n], a, b[0], b[1]);
        Mma16816(o[2 * n + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();
    page = following;
  }
  CpAsyncWait<0>();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = l[r] + __shfl_xor_sync(0xffffffffu, l[r], 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    const int row = r == 0 ? row0 : row1;
    const int64_t at = static_cast<int64_t>(tile.row + row) * p.num_qo_heads + tile.qo_head;
    __nv_bfloat16* out = p.out + at * kHeadDim + 8 * c;
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const auto word = [&](int block) {
        return PackBf16(o[4 * i + block][2 * r] * inverse, o[4 * i + block][2 * r + 1] * inverse);
      };
      const uint4 x = QuadTranspose(word(0), word(1), word(2), word(3));
      if (row < tile.num_rows) *reinterpret_cast<uint4*>(out + 32 * i) = x;
    }
    if (p.lse != nullptr && c == 0 && row < tile.num_rows) {
      p.lse[at] = total > 0 ? kLn2 * (m[r] + log2f(total)) : -INFINITY;
    }
  }
}

template <int kHeadDim>
cudaError_t Launch(const Params& p, int32_t tiles, cudaStream_t stream) {
  constexpr int kSmemBytes = kStages * 2 * kPageTokens * 2 * kHeadDim;
  const cudaError_t e =
      cudaFuncSetAttribute(PrefillMmaKernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (e != cudaSuccess) return e;
  PrefillMmaKernel<kHeadDim><<<tiles, kThreads, kSmemBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t PrefillMma(const PrefillArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0;
  if (cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  if (capability < 80 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out)) {
    return cudaErrorNotSupported;
  }
  Params p{};
  p.schedule = MakeSchedule(a);
  p.rules = a.rules;
  p.batch = a.batch;
  p.rows = {a.row_begin, a.last_rows};
  p.positions = a.positions;
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_row_stride = a.q_row_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.num_qo_heads = a.heads.num_qo_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.scale = a.heads.sm_scale * kLog2e;
  const int32_t tiles = MaxTiles(a);
  if (tiles == 0) return cudaErrorNotSupported;
  return a.heads.head_dim == 64 ? Launch<64>(p, tiles, stream) : Launch<128>(p, tiles, stream);
}

}  // namespace spl::kernels::cuda
