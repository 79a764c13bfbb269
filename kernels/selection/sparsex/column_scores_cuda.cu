// Partial sums of one KV head each, then their sum over KV heads in ascending order; no atomics.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/selection/sparsex/column_scores_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

struct Params {
  const void* q;
  int64_t q_row_stride;
  const float* lse;
  PagedBatch batch;
  const int32_t* positions;  // positions of the sequence's rows
  int32_t row_begin, sequence;
  int32_t num_qo_heads, group, head_dim;
  float scale;  // sm_scale · log2(e)
  int64_t page_bytes;
  ColumnTables tables;
  float* partial;  // [KV heads of the list, num_scores]
};

// A row at or past a column sees it when it is a sink or in the window.
struct Seen {
  int32_t sinks, window;
  __device__ bool operator()(int row, int column) const {
    return row >= column && (column < sinks || row - column < window);
  }
};

__device__ __forceinline__ Seen SeenBy(const Params& p, int kv_head) {
  const HeadRule& rule = p.tables.rules.head[kv_head];
  return rule.rule == VisibilityRule::kBand ? Seen{rule.num_sinks, rule.window} : Seen{0, 1 << 30};
}

__device__ __forceinline__ const std::byte* KeyPage(const Params& p, int kv_head, int page) {
  const int64_t physical = p.batch.page_tables[p.batch.table_offset[p.sequence] + kv_head * p.batch.head_stride + page];
  return physical < 0 ? nullptr : p.batch.pool.base + physical * p.page_bytes;
}

// ---- any shape ------------------------------------------------------------------------------------------------------
// One block for one part and KV head, one thread for one slot.
template <typename Q, typename Kv>
__global__ void __launch_bounds__(kPageTokens) GenericKernel(Params p) {
  const ColumnPart part = p.tables.parts[blockIdx.x];
  const int slot = threadIdx.x, kv_head = p.tables.kv_heads[blockIdx.y], d = p.head_dim;
  if (slot < part.first_slot || slot >= part.first_slot + part.num_slots) return;
  const int column = part.page * kPageTokens + slot;
  const auto* keys = reinterpret_cast<const Kv*>(KeyPage(p, kv_head, part.page));
  const Seen seen = SeenBy(p, kv_head);
  float sum = 0;
  if (keys != nullptr) {
    const Kv* k = keys + static_cast<int64_t>(slot) * d;
    for (int i = 0; i < p.tables.num_probes; ++i) {
      const int probe = p.tables.probes[i];
      if (!seen(p.positions[probe], column)) continue;
      const int64_t row = p.row_begin + probe;
      for (int h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h) {
        const Q* q = static_cast<const Q*>(p.q) + row * p.q_row_stride + static_cast<int64_t>(h) * d;
        float dot = 0;
        for (int c = 0; c < d; ++c) dot += ToF(q[c]) * ToF(k[c]);
        sum += exp2f(dot * p.scale - p.lse[row * p.num_qo_heads + h] * kLog2e);
      }
    }
  }
  p.partial[static_cast<int64_t>(blockIdx.y) * p.tables.num_scores + part.offset + slot - part.first_slot] = sum;
}

// ---- bf16, tensor cores ---------------------------------------------------------------------------------------------
// A warp keeps the keys of 32 slots in registers as the left operand and runs all (probe, head) pairs past them. Four
// pages share the queries of a block, which arrive in a ring of two tiles.
constexpr int kPages = 4, kWarps = 2 * kPages, kThreads = 32 * kWarps;
constexpr int kPairs = 64;      // (probe, head) pairs in a tile
constexpr int kWarpSlots = 32;  // slots of a page per warp: two left operands of 16

template <int kDim>
struct TileMemory {
  __nv_bfloat16 q[2][kPairs * kDim];
  float lse[2][kPairs];  // in log2; +inf: no such pair
  int32_t position[2][kPairs];
};

template <int kDim>
__device__ __forceinline__ void LoadTile(const Params& p, int kv_head, int tile, int stage, TileMemory<kDim>& memory) {
  constexpr int kChunks = kDim / 8;  // chunks of 16 bytes
  const int num_pairs = p.tables.num_probes * p.group;
  const uint32_t base = SmemAddress(memory.q[stage]);
  for (int i = threadIdx.x; i < kPairs * kChunks; i += kThreads) {
    const int pair = i / kChunks, chunk = i % kChunks, at = tile * kPairs + pair;
    const bool valid = at < num_pairs;
    const int probe = valid ? p.tables.probes[at / p.group] : 0;
    const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(p.q) + (p.row_begin + probe) * p.q_row_stride +
                             static_cast<int64_t>(kv_head * p.group + at % p.group) * kDim + chunk * 8;
    CpAsync16(base + Swizzled<kDim * 2>(pair, chunk), q, valid);
  }
  if (threadIdx.x < kPairs) {
    const int at = tile * kPairs + static_cast<int>(threadIdx.x);
    const bool valid = at < num_pairs;
    const int probe = valid ? p.tables.probes[at / p.group] : 0;
    memory.position[stage][threadIdx.x] = valid ? p.positions[probe] : -1;
    memory.lse[stage][threadIdx.x] =
        valid ? p.lse[static_cast<int64_t>(p.row_begin + probe) * p.num_qo_heads + kv_head * p.group + at % p.group] *
                    kLog2e
              : INFINITY;
  }
}

// The first tile that has a row at or past `column`; probes ascend.
__device__ __forceinline__ int FirstTile(const Params& p, int column) {
  int low = 0, high = p.tables.num_probes;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.positions[p.tables.probes[middle]] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low * p.group / kPairs;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 2) TensorKernel(Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& memory = *reinterpret_cast<TileMemory<kDim>*>(shared);
  constexpr int kSteps = kDim / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_part = blockIdx.x * kPages, part_idx = first_part + warp / 2;
  const int kv_head = p.tables.kv_heads[blockIdx.y];
  const bool has_part = part_idx < p.tables.num_parts;
  const ColumnPart part = has_part ? p.tables.parts[part_idx] : ColumnPart{};
  const int first_slot = warp % 2 * kWarpSlots;

  uint32_t keys[2][kSteps][4] = {};
  const std::byte* page = has_part ? KeyPage(p, kv_head, part.page) : nullptr;
  if (page != nullptr) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const auto* row = reinterpret_cast<const uint32_t*>(page) + (first_slot + 16 * m + g) * (kDim / 2) + t;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        keys[m][s][0] = row[s * 8];
        keys[m][s][1] = row[s * 8 + 8 * (kDim / 2)];
        keys[m][s][2] = row[s * 8 + 4];
        keys[m][s][3] = row[s * 8 + 8 * (kDim / 2) + 4];
      }
    }
  }

  const int num_tiles = (p.tables.num_probes * p.group + kPairs - 1) / kPairs;
  int tile = FirstTile(p, p.tables.parts[first_part].page * kPageTokens);
  int column[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) column[m][r] = part.page * kPageTokens + first_slot + 16 * m + 8 * r + g;
  }
  const Seen seen = SeenBy(p, kv_head);
  const int last_column = part.page * kPageTokens + first_slot + kWarpSlots - 1;
  float sums[2][2] = {};
  if (tile < num_tiles) LoadTile<kDim>(p, kv_head, tile, 0, memory);
  CpAsyncCommit();
  for (int stage = 0; tile < num_tiles; ++tile, stage ^= 1) {
    if (tile + 1 < num_tiles) LoadTile<kDim>(p, kv_head, tile + 1, stage ^ 1, memory);
    CpAsyncCommit();
    CpAsyncWait<1>();
    __syncthreads();
    const uint32_t q = SmemAddress(memory.q[stage]);
    // Rows ascend, and pairs that are not there weigh nothing: most tiles are seen whole and need no mask.
    const int* positions = memory.position[stage];
    const bool whole = positions[0] >= last_column && seen.window == (1 << 30);
    const auto add = [&](auto masked) {
#pragma unroll 4
      for (int n = 0; n < kPairs; n += 8) {
        float scores[2][4] = {};
#pragma unroll
        for (int s = 0; s < kSteps; s += 2) {
          uint32_t b[4];
          LdMatrix4(b, q + Swizzled<kDim * 2>(n + lane % 8, 2 * s + lane / 8));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            Mma16816(scores[m], keys[m][s], b[0], b[1]);
            Mma16816(scores[m], keys[m][s + 1], b[2], b[3]);
          }
        }
        const float2 lse = *reinterpret_cast<const float2*>(&memory.lse[stage][n + 2 * t]);
        const int2 position = *reinterpret_cast<const int2*>(&positions[n + 2 * t]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float a = Exp2(scores[m][2 * r] * p.scale - lse.x), b = Exp2(scores[m][2 * r + 1] * p.scale - lse.y);
            if constexpr (decltype(masked)::value) {
              a = seen(position.x, column[m][r]) ? a : 0.0f;
              b = seen(position.y, column[m][r]) ? b : 0.0f;
            }
            sums[m][r] += a + b;
          }
        }
      }
    };
    if (whole) {
      add(std::false_type());
    } else {
      add(std::true_type());
    }
    __syncthreads();  // the tile after the next overwrites this one
  }
  if (!has_part) return;
  float* out = p.partial + static_cast<int64_t>(blockIdx.y) * p.tables.num_scores + part.offset - part.first_slot;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sums[m][r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int slot = first_slot + 16 * m + 8 * r + g;
      if (t == 0 && slot >= part.first_slot && slot < part.first_slot + part.num_slots)
        out[slot] = page == nullptr ? 0.0f : sum;
    }
  }
}

__global__ void SumHeadsKernel(const float* partial, int num_heads, int num_scores, float* scores) {
  LetNextStart();
  WaitForPrevious();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_scores) return;
  float sum = 0;
  for (int h = 0; h < num_heads; ++h) sum += partial[static_cast<int64_t>(h) * num_scores + i];
  scores[i] += sum;
}

template <int kDim>
cudaError_t LaunchTensor(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(TileMemory<kDim>);
  static const cudaError_t allowed =
      cudaFuncSetAttribute(TensorKernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(static_cast<unsigned>((p.tables.num_parts + kPages - 1) / kPages),
                  static_cast<unsigned>(p.tables.num_kv_heads));
  TensorKernel<kDim><<<grid, kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const Params& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.tables.num_parts), static_cast<unsigned>(p.tables.num_kv_heads));
  GenericKernel<Q, Kv><<<grid, kPageTokens, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchMma(const ColumnScoresArgs& a, const Params& p, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.q.data) % 16 == 0 && a.q_row_stride % 8 == 0;
  if (a.q.dtype != DType::kBF16 || a.pool.dtype != DType::kBF16 || !aligned) return cudaErrorNotSupported;
  if (a.shape.head_dim == 128) return LaunchTensor<128>(p, stream);
  return a.shape.head_dim == 64 ? LaunchTensor<64>(p, stream) : cudaErrorNotSupported;
}

cudaError_t LaunchAnyShape(const ColumnScoresArgs& a, const Params& p, cudaStream_t stream) {
  const bool q_bf16 = a.q.dtype == DType::kBF16, kv_bf16 = a.pool.dtype == DType::kBF16;
  if (q_bf16) {
    return kv_bf16 ? LaunchGeneric<__nv_bfloat16, __nv_bfloat16>(p, stream)
                   : LaunchGeneric<__nv_bfloat16, float>(p, stream);
  }
  return kv_bf16 ? LaunchGeneric<float, __nv_bfloat16>(p, stream) : LaunchGeneric<float, float>(p, stream);
}

cudaError_t LaunchPartials(const ColumnScoresArgs& a, const PagedBatch& batch, const int32_t* positions,
                           const ColumnTables& tables, cudaStream_t stream, ColumnVariant variant) {
  const bool any = variant == ColumnVariant::kAuto;
  const Params p{a.q.data,
                 a.q_row_stride,
                 a.lse,
                 batch,
                 positions,
                 a.rows.row_begin,
                 a.sequence,
                 a.shape.num_qo_heads,
                 a.shape.num_qo_heads / a.shape.num_kv_heads,
                 a.shape.head_dim,
                 a.shape.sm_scale * kLog2e,
                 static_cast<int64_t>(a.pool.page_bytes()),
                 tables,
                 static_cast<float*>(tables.scratch)};
  cudaError_t e = cudaErrorNotSupported;
  if (any || variant == ColumnVariant::kSm90) e = ColumnPartialsSm90(a, batch, positions, tables, stream);
  if (e == cudaErrorNotSupported && (any || variant == ColumnVariant::kMma)) e = LaunchMma(a, p, stream);
  if (e == cudaErrorNotSupported && (any || variant == ColumnVariant::kGeneric)) e = LaunchAnyShape(a, p, stream);
  return e;
}

}  // namespace

size_t ColumnScratchBytes(const AttentionShape& shape, int32_t num_probes, int32_t num_kv_heads, int32_t num_scores) {
  return static_cast<size_t>(num_kv_heads) * num_scores * sizeof(float) + 128 +
         ColumnPackBytes(shape, num_probes, num_kv_heads);
}

cudaError_t ColumnScores(const ColumnScoresArgs& a, const PagedBatch& batch, const int32_t* positions,
                         const ColumnTables& tables, cudaStream_t stream, ColumnVariant variant) {
  if (tables.num_parts == 0 || tables.num_probes == 0) return cudaSuccess;
  cudaError_t e = LaunchPartials(a, batch, positions + a.rows.row_begin, tables, stream, variant);
  if (e != cudaSuccess) return e;
  constexpr int kSumThreads = 256;
  return LaunchEarly(SumHeadsKernel, (tables.num_scores + kSumThreads - 1) / kSumThreads, kSumThreads, 0, stream,
                     static_cast<const float*>(tables.scratch), tables.num_kv_heads, tables.num_scores, a.scores);
}

}  // namespace spl::kernels::cuda
